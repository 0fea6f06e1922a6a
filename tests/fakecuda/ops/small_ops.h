// Ops whose CPU kernel is missing, or rounds otherwise than CUDA's.
#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "launch.h"

namespace fake_ops {

// The CPU has no backward of the fused RMS norm.
inline std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input,
                                                    at::IntArrayRef shape, const Tensor& rstd,
                                                    const std::optional<Tensor>& weight,
                                                    std::array<bool, 2> wanted) {
  c10::cuda::CUDAGuard guard(input.device());
  const auto contiguous = at::MemoryFormat::Contiguous;
  const bool weighted = weight && weight->defined();
  Tensor grad_input = wanted[0] ? at::empty_like(input, contiguous) : Tensor();
  Tensor grad_weight = wanted[1] && weighted ? at::empty_like(*weight, contiguous) : Tensor();
  std::vector<int64_t> last;
  for (size_t i = 0; i < shape.size(); ++i) last.push_back(-1 - static_cast<int64_t>(i));
  auto work = [last](Tensors& all) {
    const Tensor grad = all[0].to(at::kFloat), scale = all[2].to(at::kFloat);
    const Tensor normed = all[1].to(at::kFloat) * scale;
    const Tensor weighted = all[3].defined() ? grad * all[3].to(at::kFloat) : grad;
    if (all[4].defined()) {
      all[4].copy_(scale * (weighted - normed * at::mean(weighted * normed, last, true)));
    }
    if (all[5].defined()) {
      const Tensor rows = (grad * normed).reshape({-1, all[5].numel()});
      all[5].copy_(rows.sum(0).reshape(all[5].sizes()));
    }
  };
  run_over({grad, input, rstd, weight.value_or(Tensor()), grad_input, grad_weight}, work,
           "_fused_rms_norm_backward");
  return {grad_input, grad_weight};
}

// CUDA divides first, and so does this. The CPU's kernel multiplies first.
inline Tensor& addcdiv_(Tensor& self, const Tensor& above, const Tensor& below,
                        const at::Scalar& value) {
  c10::cuda::CUDAGuard guard(self.device());
  auto work = [value](Tensors& all) {
    const Tensor quotient = all[1].div(all[2]);
    all[0].addcmul_(quotient, at::full({}, value, quotient.options()));
  };
  run_over({self, above, below}, work, "addcdiv_");
  return self;
}

inline void foreach_addcdiv_scalars(at::TensorList self, at::TensorList above, at::TensorList below,
                                    at::ArrayRef<at::Scalar> values) {
  for (size_t i = 0; i < self.size(); ++i) {
    Tensor one = self[i];
    addcdiv_(one, above[i], below[i], values[i]);
  }
}

inline void foreach_addcdiv_scalar(at::TensorList self, at::TensorList above, at::TensorList below,
                                   const at::Scalar& value) {
  for (size_t i = 0; i < self.size(); ++i) {
    Tensor one = self[i];
    addcdiv_(one, above[i], below[i], value);
  }
}

}  // namespace fake_ops
