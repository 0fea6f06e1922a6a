// A copy of memory that was given back loses the device (memory.cpp). A test loses it by a call, and
// gets it back by another one, which no GPU allows.
#include "loss.h"

#include <atomic>

namespace {
std::atomic<cudaError_t> why{cudaSuccess};
}

cudaError_t fake::lost() { return why; }

void fake::lose(cudaError_t error) { why = error; }

// `error`: what all later calls return; 0 brings the device back.
API void fakecuda_lose(int error) { fake::lose(static_cast<cudaError_t>(error)); }
