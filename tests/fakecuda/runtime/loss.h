// The loss of a device: once it is lost, every call that waits, asks or gives it work fails.
#pragma once

#include "errors.h"

namespace fake {

// Why a device is lost, or cudaSuccess.
cudaError_t lost(int device);

void lose(int device, cudaError_t why);

}  // namespace fake

#define FAIL_IF_LOST(device) \
  if (fake::lost(device) != cudaSuccess) FAIL(fake::lost(device))
