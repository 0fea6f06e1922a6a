// Scaled dot product attention of three libraries, by its definition, in float. Dropout's mask is
// drawn anew in the backward from the seed that the forward returned. What differs between the
// libraries is where log-sum and seed lie: on the device, or, for memory-efficient attention
// outside of a capture, on the host; and the order in which results get memory and the generator is
// asked, which is that of torch's kernels: a generator may take memory too.
#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <tuple>

#include "draws.h"

namespace fake_ops {

struct Attention {
  double dropout;
  bool causal;
  double scale;
};

inline Attention attention_of(const Tensor& query, double dropout, bool causal,
                              std::optional<double> scale) {
  const auto width = static_cast<double>(query.size(-1));
  return {dropout, causal, scale.value_or(1 / std::sqrt(width))};
}

struct Weights {
  // Probabilities, which of them are kept (and by how much they grow), and the log-sum.
  Tensor probabilities, mask, log_sum;
};

inline Weights weigh(const Attention& how, const Tensor& query, const Tensor& key,
                     const Tensor& bias, uint64_t seed) {
  Tensor scores =
      at::matmul(query.to(at::kFloat), key.to(at::kFloat).transpose(-2, -1)) * how.scale;
  if (bias.defined()) scores = scores + bias.to(at::kFloat);
  if (how.causal) {
    const Tensor seen = at::ones({query.size(-2), key.size(-2)}, at::kBool).tril();
    scores = scores.masked_fill(seen.logical_not(), -INFINITY);
  }
  Weights made{at::softmax(scores, -1), {}, at::logsumexp(scores, -1)};
  if (how.dropout > 0) {
    auto generator = at::detail::createCPUGenerator(mixed(seed, 0));
    const Tensor drawn = at::rand(scores.sizes(), generator, at::TensorOptions());
    made.mask = drawn.ge(how.dropout).to(at::kFloat) / (1 - how.dropout);
  } else {
    made.mask = at::ones_like(made.probabilities);
  }
  return made;
}

// Writes the output and returns the log-sum.
inline Tensor attend(const Attention& how, const Tensor& query, const Tensor& key,
                     const Tensor& value, const Tensor& bias, uint64_t seed, const Tensor& output) {
  const Weights weights = weigh(how, query, key, bias, seed);
  output.copy_(at::matmul(weights.probabilities * weights.mask, value.to(at::kFloat)));
  return weights.log_sum;
}

struct Inputs {
  Tensor query, key, value;
};

inline void attend_backward(const Attention& how, const Tensor& grad_output, const Inputs& in,
                            const Tensor& bias, uint64_t seed, const Inputs& grads) {
  const Weights weights = weigh(how, in.query, in.key, bias, seed);
  const Tensor& kept = weights.probabilities;
  const Tensor grad = grad_output.to(at::kFloat);
  grads.value.copy_(at::matmul((kept * weights.mask).transpose(-2, -1), grad));
  const Tensor to_kept = at::matmul(grad, in.value.to(at::kFloat).transpose(-2, -1)) * weights.mask;
  const Tensor to_scores = kept * (to_kept - (to_kept * kept).sum(-1, true));
  grads.query.copy_(at::matmul(to_scores, in.key.to(at::kFloat)) * how.scale);
  grads.key.copy_(at::matmul(to_scores.transpose(-2, -1), in.query.to(at::kFloat)) * how.scale);
}

// Results lie as (batch, rows, heads, width), whatever the inputs' layout.
inline Tensor by_rows(const Tensor& like) {
  return at::empty_like(like.transpose(1, 2).contiguous()).transpose(1, 2);
}

inline Draw dropout_draw(const Tensor& query, double dropout) {
  return dropout > 0 ? draw_on(query.get_device()) : Draw{};
}

inline uint64_t told_seed(const Tensor& seed) {
  return *static_cast<const uint64_t*>(seed.const_data_ptr());
}

// A seed fills the first number; an offset, which the fake does not use, is 0.
inline void tell_seed(const Tensor& seed, const Tensor& offset, uint64_t value) {
  *static_cast<uint64_t*>(seed.mutable_data_ptr()) = value;
  *static_cast<uint64_t*>(offset.mutable_data_ptr()) = 0;
}

// ---- flash attention

using FlashResults =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
using InputGrads = std::tuple<Tensor, Tensor, Tensor>;

inline FlashResults flash(const Tensor& query, const Tensor& key, const Tensor& value,
                          double dropout, bool causal, bool, std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  const auto how = attention_of(query, dropout, causal, scale);
  Tensor output = by_rows(query);
  Tensor log_sum =
      at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  Tensor random = at::empty({2}, query.options().dtype(at::kUInt64));
  Tensor unused = at::empty({}, query.options().dtype(at::kUInt64));
  const Draw draw = dropout_draw(query, dropout);
  auto work = [=](Tensors& all) {
    const uint64_t seed = draw.random ? draw.seed() : 0;
    if (draw.random) tell_seed(all[5][0], all[5][1], seed);
    all[4].copy_(attend(how, all[0], all[1], all[2], {}, seed, all[3]));
  };
  run_over({query, key, value, output, log_sum, random}, work, "flash_attention");
  return {output,   log_sum,       Tensor(),
          Tensor(), query.size(2), key.size(2),
          random,   unused,        at::empty({0}, query.options())};
}

inline InputGrads flash_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                 const Tensor& value, const Tensor&, const Tensor&, const Tensor&,
                                 const Tensor&, c10::SymInt, c10::SymInt, double dropout,
                                 bool causal, const Tensor& random, const Tensor&,
                                 std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  const auto how = attention_of(query, dropout, causal, scale);
  Inputs grads{by_rows(query), by_rows(key), by_rows(value)};
  auto work = [=](Tensors& all) {
    const uint64_t seed = how.dropout > 0 ? told_seed(all[4]) : 0;
    attend_backward(how, all[0], {all[1], all[2], all[3]}, {}, seed, {all[5], all[6], all[7]});
  };
  run_over({grad, query, key, value, random, grads.query, grads.key, grads.value}, work,
           "flash_attention_backward");
  return {grads.query, grads.key, grads.value};
}

// ---- memory-efficient attention

using EfficientResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The log-sum's rows are padded to a multiple of it.
constexpr int64_t EFFICIENT_ROWS = 32;

inline EfficientResults efficient(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const std::optional<Tensor>& bias, bool with_log_sum,
                                  double dropout, bool causal, std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  const auto how = attention_of(query, dropout, causal, scale);
  const Draw draw = dropout_draw(query, dropout);
  const bool captured = capturing();
  const auto where = captured ? query.device() : c10::Device(at::kCPU);
  const auto options = at::TensorOptions().dtype(at::kLong).device(where);
  Tensor seed = at::empty({}, options), offset = at::empty({}, options);
  const auto padded = (query.size(2) + EFFICIENT_ROWS - 1) / EFFICIENT_ROWS * EFFICIENT_ROWS;
  Tensor output = by_rows(query);
  Tensor log_sum = at::empty({query.size(0), query.size(1), with_log_sum ? padded : 0},
                             query.options().dtype(at::kFloat));
  const uint64_t known = draw.random && !captured ? draw.seed() : 0;
  if (!captured) tell_seed(seed, offset, known);
  auto work = [=](Tensors& all) {
    const bool told_now = captured && draw.random;
    const uint64_t used = told_now ? draw.seed() : known;
    if (told_now) tell_seed(all[6], all[7], used);
    const Tensor sums = attend(how, all[0], all[1], all[2], all[5], used, all[3]);
    if (with_log_sum) all[4].narrow(2, 0, all[0].size(2)).copy_(sums);
  };
  run_over({query, key, value, output, log_sum, bias.value_or(Tensor()), captured ? seed : Tensor(),
            captured ? offset : Tensor()},
           work, "efficient_attention");
  return {output, log_sum, seed, offset};
}

inline EfficientResults efficient_backward(const Tensor& grad, const Tensor& query,
                                           const Tensor& key, const Tensor& value,
                                           const Tensor& bias, const Tensor&, const Tensor&,
                                           const Tensor& seed, const Tensor&, double dropout,
                                           std::array<bool, 4>, bool causal,
                                           std::optional<double> scale) {
  if (!grad.defined()) return {};
  c10::cuda::CUDAGuard guard(query.device());
  const auto how = attention_of(query, dropout, causal, scale);
  const bool captured = seed.is_cuda();
  const uint64_t known = captured ? 0 : told_seed(seed);
  Inputs grads{by_rows(query), by_rows(key), by_rows(value)};
  auto work = [=](Tensors& all) {
    const uint64_t used = captured ? told_seed(all[4]) : known;
    attend_backward(how, all[0], {all[1], all[2], all[3]}, all[8], used, {all[5], all[6], all[7]});
  };
  run_over({grad, query, key, value, captured ? seed : Tensor(), grads.query, grads.key,
            grads.value, bias},
           work, "efficient_attention_backward");
  return {grads.query, grads.key, grads.value, Tensor()};
}

// ---- cuDNN's attention

inline FlashResults cudnn_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const std::optional<Tensor>& bias, bool with_log_sum,
                                    double dropout, bool causal, bool,
                                    std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  const auto how = attention_of(query, dropout, causal, scale);
  const auto options = query.options().dtype(at::kLong);
  Tensor seed = at::empty({}, options), offset = at::empty({}, options);
  const Draw draw = dropout_draw(query, dropout);
  Tensor output = by_rows(query), log_sum;
  if (with_log_sum) {
    log_sum = at::empty({query.size(0), query.size(1), query.size(2), 1},
                        query.options().dtype(at::kFloat));
  }
  auto work = [=](Tensors& all) {
    const uint64_t used = draw.random ? draw.seed() : 0;
    if (draw.random) tell_seed(all[5], all[6], used);
    const Tensor sums = attend(how, all[0], all[1], all[2], all[7], used, all[3]);
    if (with_log_sum) all[4].copy_(sums.unsqueeze(-1));
  };
  run_over({query, key, value, output, log_sum, seed, offset, bias.value_or(Tensor())}, work,
           "cudnn_attention");
  return {output, log_sum, Tensor(), Tensor(), query.size(2), key.size(2), seed, offset, Tensor()};
}

inline InputGrads cudnn_attention_backward(const Tensor& grad, const Tensor& query,
                                           const Tensor& key, const Tensor& value, const Tensor&,
                                           const Tensor&, const Tensor& seed, const Tensor&,
                                           const Tensor& bias, const Tensor&, const Tensor&,
                                           c10::SymInt, c10::SymInt, double dropout, bool causal,
                                           std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  const auto how = attention_of(query, dropout, causal, scale);
  Inputs grads{by_rows(query), by_rows(key), by_rows(value)};
  auto work = [=](Tensors& all) {
    const uint64_t used = how.dropout > 0 ? told_seed(all[4]) : 0;
    attend_backward(how, all[0], {all[1], all[2], all[3]}, all[8], used, {all[5], all[6], all[7]});
  };
  run_over({grad, query, key, value, seed, grads.query, grads.key, grads.value, bias}, work,
           "cudnn_attention_backward");
  return {grads.query, grads.key, grads.value};
}

}  // namespace fake_ops
