// Errors: the last one of each thread, and their texts. The texts are those of CUDA for the errors
// that the fake returns; every other one is "fake error NUMBER".
#include "errors.h"

#include <cstdarg>
#include <cstdio>
#include <utility>

#include "settings.h"

namespace fake {

namespace {
thread_local cudaError_t last_error = cudaSuccess;
}

void say(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::fputs("[fakecuda] ", stderr);
  std::vfprintf(stderr, format, values);
  std::fputc('\n', stderr);
  va_end(values);
}

cudaError_t fail(cudaError_t error, const char* what) {
  last_error = error;
  if (VERBOSE || error == cudaErrorStreamCaptureUnsupported) {
    say("%s: %s", what, cudaGetErrorString(error));
  }
  return error;
}

cudaError_t not_ready() { return last_error = cudaErrorNotReady; }

}  // namespace fake

API cudaError_t cudaGetLastError() { return std::exchange(fake::last_error, cudaSuccess); }

API cudaError_t cudaPeekAtLastError() { return fake::last_error; }

API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered:
      return "pointer does not correspond to a registered memory region";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorStreamCaptureWrongThread:
      return "attempt to terminate a thread-local capture sequence from another thread";
    default: {
      static thread_local char text[64];
      std::snprintf(text, sizeof text, "fake error %d", static_cast<int>(error));
      return text;
    }
  }
}

API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
