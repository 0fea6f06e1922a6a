// A test loses the device by a call, and gets it back by another one, which no GPU allows.
#include "loss.h"

#include <atomic>

namespace {
std::atomic<cudaError_t> why{cudaSuccess};
}

cudaError_t fake::lost() { return why; }

// `error`: what all later calls return; 0 brings the device back.
API void fakecuda_lose(int error) { why = static_cast<cudaError_t>(error); }
