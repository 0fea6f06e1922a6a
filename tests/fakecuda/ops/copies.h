// copy_: between host and device, and between equal layouts, torch's own function runs, which calls
// cudaMemcpyAsync. What a CUDA kernel does, layouts and dtypes that differ, the CPU's copy does.
#pragma once

#include <ATen/ops/copy_native.h>

#include "launch.h"

namespace fake_ops {

inline bool is_plain_copy(const Tensor& to, const Tensor& from) {
  return to.dtype() == from.dtype() && to.sizes() == from.sizes() &&
         to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
         from.is_non_overlapping_and_dense() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg();
}

inline Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_cuda() && from.is_cuda() && !is_plain_copy(to, from) && to.numel()) {
    const Tensor near = from.device() == to.device() ? from : from.contiguous().to(to.device());
    c10::cuda::CUDAGuard guard(to.device());
    run_over({to, near}, [](Tensors& all) { all[0].copy_(all[1]); }, "copy_");
    return to;
  }
  if (to.is_cuda() && !from.is_cuda() && from.numel() == 1 && to.numel() > 1) {
    c10::cuda::CUDAGuard guard(to.device());
    run_over({to}, [value = from.clone()](Tensors& all) { all[0].copy_(value); }, "copy_");
    return to;
  }
  return at::native::copy_(to, from, non_blocking);
}

}  // namespace fake_ops
