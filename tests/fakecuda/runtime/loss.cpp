// A copy of memory that was given back loses the device (memory.cpp). A test loses it by a call, and
// gets it back by another one, which no GPU allows.
#include "loss.h"

#include <atomic>

#include "devices.h"

namespace {
std::atomic<cudaError_t> why[fake::MOST_DEVICES];  // cudaSuccess is 0
}

cudaError_t fake::lost(int device) { return why[device]; }

void fake::lose(int device, cudaError_t error) { why[device] = error; }

// `error`: what all later calls to the device return; 0 brings it back.
API void fakecuda_lose(int device, int error) {
  fake::lose(device, static_cast<cudaError_t>(error));
}
