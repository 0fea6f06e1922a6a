// Randomness: a CUDA generator is asked for a part of its sequence, as CUDA's kernels do, and that
// part's place seeds a draw of the CPU. So equal seeds and offsets give equal numbers, which are
// not a GPU's. A captured draw reads seed and offset when it runs.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
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

// While it lives, the CPU's generator is the fake's. Then it is as it was.
class BorrowedGenerator {
 public:
  BorrowedGenerator() : turn_(turns()), generator_(at::detail::getDefaultCPUGenerator()) {
    std::lock_guard<std::mutex> held(generator_.mutex());
    before_ = generator_.get_state();
  }
  ~BorrowedGenerator() {
    std::lock_guard<std::mutex> held(generator_.mutex());
    generator_.set_state(before_);
  }
  BorrowedGenerator(const BorrowedGenerator&) = delete;
  BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

  void seed(uint64_t seed) {
    std::lock_guard<std::mutex> held(generator_.mutex());
    generator_.set_current_seed(seed);
  }

 private:
  static std::mutex& turns() {
    static std::mutex one;
    return one;
  }
  std::lock_guard<std::mutex> turn_;
  at::Generator generator_;
  Tensor before_;
};

template <class Work>
void with_draw(const Draw& draw, Work work) {
  if (!draw.random) {
    work();
    return;
  }
  BorrowedGenerator borrowed;
  borrowed.seed(draw.seed());
  work();
}

}  // namespace fake_ops
