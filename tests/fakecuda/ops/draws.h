// Randomness: a CUDA generator is asked for a part of its sequence, as CUDA's kernels do, and that
// part's place seeds a draw of the CPU. So equal seeds and offsets give equal numbers, which are
// not a GPU's. A captured draw reads seed and offset when it runs.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/stack.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <mutex>

#include "launch.h"

namespace fake_ops {

// How many numbers a thread of a kernel draws: the offset grows by it.
constexpr uint64_t DRAWN = 4;

inline uint64_t mixed(uint64_t seed, uint64_t offset) {
  constexpr uint64_t ODD_1 = 0x9E3779B97F4A7C15u, ODD_2 = 0x632BE59BD9B4E019u,
                     ODD_3 = 0xD6E8FEB86659FD93u;
  return (seed * ODD_1) ^ ((offset + ODD_2) * ODD_3);
}

struct Draw {
  bool random = false;
  at::PhiloxCudaState state;

  uint64_t seed() const {
    if (!state.captured_) return mixed(state.seed_.val, state.offset_.val);
    return mixed(*state.seed_.ptr, *state.offset_.ptr + state.offset_intragraph_);
  }
};

inline Draw draw_from(at::CUDAGeneratorImpl* generator) {
  std::lock_guard<std::mutex> held(generator->mutex_);
  return {true, generator->philox_cuda_state(DRAWN)};
}

inline Draw draw_on(c10::DeviceIndex device) {
  return draw_from(at::check_generator<at::CUDAGeneratorImpl>(
      at::cuda::detail::getDefaultCUDAGenerator(device)));
}

// What the CPU's kernel of a draw is given. It never takes the CPU's own generator: the host may
// seed that one while the stream draws.
inline at::Generator generator_of(const Draw& draw) {
  return at::make_generator<at::CPUGeneratorImpl>(draw.random ? draw.seed() : 0);
}

// As the CPU's native_dropout (input, p, train), whose kernel takes no generator.
inline void native_dropout(torch::jit::Stack& work, const at::Generator& generator) {
  const Tensor input = work[0].toTensor();
  const double kept = 1 - work[1].toDouble();
  const bool drops = work[2].isNone() || work[2].toBool();
  const Tensor mask = at::ones_like(input, at::kBool);
  if (drops) mask.bernoulli_(kept, generator);
  const double scale = kept == 0 ? 0 : 1 / kept;
  work = {drops ? input.mul(mask).mul_(scale) : input.clone(), mask};
}

}  // namespace fake_ops
