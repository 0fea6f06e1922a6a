// The last error of each thread, which cudaGetLastError returns.
#pragma once

#include <cuda_runtime_api.h>

#define API extern "C" __attribute__((visibility("default")))
#define FAIL(error) return fake::fail(error, __func__)

namespace fake {

// Prints one line to stderr, as printf does.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Remembers the error and returns it. `what`: the function that fails.
cudaError_t fail(cudaError_t error, const char* what);

// Remembers that something is not ready yet, which is an answer and no failure.
cudaError_t not_ready();

}  // namespace fake
