// The loss of the device: once it is lost, every call that waits, asks or gives it work fails.
#pragma once

#include "errors.h"

namespace fake {

// Why the device is lost, or cudaSuccess.
cudaError_t lost();

void lose(cudaError_t why);

}  // namespace fake

#define FAIL_IF_LOST() \
  if (fake::lost() != cudaSuccess) FAIL(fake::lost())
