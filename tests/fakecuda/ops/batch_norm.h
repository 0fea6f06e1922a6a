// cuDNN's batch norm, whose backward needs a reserve of the forward, for half precision: here the
// reserve holds a mark. The backward fails where the reserve is missing, and its gradients are no
// numbers where the mark was written over, or never was there: a kernel is tried on made-up memory.
#pragma once

#include <cmath>
#include <optional>
#include <tuple>

#include "launch.h"

namespace fake_ops {

using OptionalTensor = std::optional<Tensor>;

constexpr int RESERVED = 3;

inline bool has_reserve(const Tensor& input) { return input.scalar_type() == at::kHalf; }

inline OptionalTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
    double momentum, double eps) {
  c10::cuda::CUDAGuard guard(input.device());
  const auto channels = training ? input.size(1) : 0;
  const auto reserved = training && has_reserve(input) ? (input.numel() + 7) / 8 + 32 : 0;
  Tensor output = at::empty_like(input);
  Tensor mean = at::empty({channels}, weight.options());
  Tensor deviation = at::empty({channels}, weight.options());
  Tensor reserve = at::empty({reserved}, input.options().dtype(at::kByte));
  auto work = [=](Tensors& all) {
    auto [made, saved_mean, saved_deviation] =
        at::native_batch_norm(all[0], all[1], if_defined(all[2]), if_defined(all[3]),
                              if_defined(all[4]), training, momentum, eps);
    all[5].copy_(made);
    if (!training) return;
    all[6].copy_(saved_mean);
    all[7].copy_(saved_deviation);
    all[8].fill_(RESERVED);
  };
  run_over({input, weight, bias.value_or(Tensor()), running_mean.value_or(Tensor()),
            running_var.value_or(Tensor()), output, mean, deviation, reserve},
           work, "cudnn_batch_norm");
  return {output, mean, deviation, reserve};
}

inline std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(
    const Tensor& input, const Tensor& grad, const Tensor& weight, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor& mean, const OptionalTensor& deviation, double eps,
    const Tensor& reserve) {
  c10::cuda::CUDAGuard guard(input.device());
  TORCH_CHECK(reserve.numel() > 0 || !has_reserve(input),
              "fake cuDNN: batch norm's reserve of the forward pass is missing");
  Tensor grad_input = at::empty_like(input), grad_weight = at::empty_like(weight),
         grad_bias = at::empty_like(weight);
  auto work = [=](Tensors& all) {
    auto [to_input, to_weight, to_bias] = at::native_batch_norm_backward(
        all[1], all[0], all[2], {}, {}, all[3], all[4], true, eps, {true, true, true});
    all[6].copy_(to_input);
    all[7].copy_(to_weight);
    all[8].copy_(to_bias);
    if ((all[5] == RESERVED).all().item<bool>()) return;
    for (int grad = 6; grad <= 8; ++grad) all[grad].fill_(NAN);
  };
  run_over({input, grad, weight, mean.value_or(Tensor()), deviation.value_or(Tensor()), reserve,
            grad_input, grad_weight, grad_bias},
           work, "cudnn_batch_norm_backward");
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace fake_ops
