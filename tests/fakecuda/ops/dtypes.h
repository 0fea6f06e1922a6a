// Where CPU kernels take or give other dtypes than CUDA's do.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

#include "launch.h"

namespace fake_ops {

using torch::jit::Stack;

inline bool is_softmax(const std::string& name) {
  return name == "aten::_softmax" || name == "aten::_log_softmax";
}

inline bool is_softmax_backward(const std::string& name) {
  return name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data";
}

// A softmax that widens (self, dim, half_to_float), its backward (grad, output, dim, input_dtype),
// and a layer norm's backward (grad, input, shape, mean, rstd, weight, ...), whose statistics are
// float on CUDA and the weight's dtype on the CPU.
inline void as_cpu_takes(const std::string& name, Stack& arguments) {
  if (is_softmax(name) && arguments.size() == 3 && arguments[2].toBool()) {
    arguments[0] = arguments[0].toTensor().to(at::kFloat);
    arguments[2] = false;
  }
  if (is_softmax_backward(name)) arguments[3] = arguments[0].toTensor().scalar_type();
  if (name == "aten::native_layer_norm_backward") {
    const auto& weight = arguments[5];
    const bool wide = weight.isTensor() && weight.toTensor().defined() &&
                      weight.toTensor().scalar_type() == at::kFloat;
    const auto dtype = wide ? at::kFloat : arguments[1].toTensor().scalar_type();
    for (size_t i : {3, 4}) {
      if (arguments[i].isTensor() && arguments[i].toTensor().defined()) {
        arguments[i] = arguments[i].toTensor().to(dtype);
      }
    }
  }
}

// `arguments`: those of the call, of which tensors may have been left out.
inline void as_cuda_gives(const std::string& name, const Stack& arguments, Stack& results) {
  if (name == "aten::native_layer_norm" || name == "aten::native_group_norm" ||
      name == "aten::native_batch_norm") {
    for (size_t i : {1, 2}) {
      if (!results[i].isTensor() || !results[i].toTensor().defined()) continue;
      const Tensor statistics = results[i].toTensor();
      if (at::isReducedFloatingType(statistics.scalar_type())) {
        results[i] = statistics.to(at::kFloat);
      }
    }
  }
  if (is_softmax_backward(name)) {
    results[0] = results[0].toTensor().to(arguments[3].toScalarType());
  }
}

}  // namespace fake_ops
