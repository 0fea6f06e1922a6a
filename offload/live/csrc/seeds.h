// Memory-efficient attention keeps the seed of its dropout on the host, and its backward pass reads it there.
// In a step on a GPU all tensors are on the GPU, so the seeds are moved there and, when they are read, back.
//
// While the stream is captured into a CUDA graph, torch itself keeps them on the device.

#pragma once

#include <ATen/ops/full.h>
#include <torch/csrc/utils/pybind.h>

#include "session.h"

namespace live {

inline bool is_seed(const c10::Argument& one) { return one.name() == "philox_seed" || one.name() == "philox_offset"; }

inline bool is_being_captured() {
  pybind11::gil_scoped_acquire held;
  return pybind11::module_::import("torch").attr("cuda").attr("is_current_stream_capturing")().cast<bool>();
}

// Bring the seeds among these arguments to the host, before the kernel runs.
inline void give_seeds(const OperatorHandle& op, Stack& stack) {
  if (!traits_of(op).keeps_seeds) return;
  const auto& schema = op.schema().arguments();
  const auto chance = op.schema().argumentIndexWithName("dropout_p");
  const size_t first = stack.size() - schema.size();
  if (!chance || stack[first + *chance].toDouble() == 0) return;  // nobody reads them
  for (size_t n = 0; n < schema.size(); n++) {
    auto& given = stack[first + n];
    if (!is_seed(schema[n]) || !given.isTensor() || given.toTensor().is_cpu() || is_being_captured()) continue;
    given = given.toTensor().cpu();
  }
}

// Bring the seeds among these results to the device, after the kernel has run.
inline void take_seeds(const OperatorHandle& op, Stack& stack) {
  if (!traits_of(op).keeps_seeds || session().device == c10::kCPU) return;
  const auto& schema = op.schema().returns();
  for (size_t n = 0; n < schema.size(); n++) {
    auto& made = stack[stack.size() - schema.size() + n];
    if (!is_seed(schema[n]) || !made.isTensor() || !made.toTensor().is_cpu()) continue;
    const auto& seed = made.toTensor();
    const auto device = stack[stack.size() - schema.size()].toTensor().device();
    made = at::full(seed.sizes(), seed.item(), seed.options().device(device));  // a copy would wait for the device
  }
}

}  // namespace live
