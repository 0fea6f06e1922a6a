// Lets autograd go over tensors of a GPU that this machine lacks. No kernel ever runs for it.
//
//   a guard       torch asks it for streams                     one that does nothing
//   hooks         torch asks whether a device has a context     it has none, instead of an error
//   the engine    goes backward in a thread of each device      one thread more

#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <unistd.h>

#include <cstring>

#include "session.h"

namespace live {

// The engine starts its threads once, and may have done so when there was no device.
template <auto Start>
struct ReachEngine {
  friend void start_threads(torch::autograd::Engine& engine) { (engine.*Start)(); }
};
template struct ReachEngine<&torch::autograd::Engine::start_device_threads>;
void start_threads(torch::autograd::Engine& engine);

inline bool has_no_context(const void*, c10::DeviceIndex) { return false; }

// Torch's own answer raises where there is no driver. A pointer to a virtual function says which entry of the
// table it is.
inline void answer_for_contexts() {
  const auto asks = &at::AcceleratorHooksInterface::hasPrimaryContext;
  intptr_t offset;
  std::memcpy(&offset, &asks, sizeof offset);
  const auto& hooks = at::detail::getCUDAHooks();
  char* const table = *reinterpret_cast<char* const*>(&hooks);
  auto* entry = reinterpret_cast<bool (**)(const void*, c10::DeviceIndex)>(table + (offset & ~intptr_t(1)));
  const auto page = reinterpret_cast<uintptr_t>(entry) & ~static_cast<uintptr_t>(sysconf(_SC_PAGESIZE) - 1);
  TORCH_CHECK(mprotect(reinterpret_cast<void*>(page), sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE) == 0,
      "this system lets nobody say that a GPU is absent, so a step for one cannot be estimated here");
  *entry = &has_no_context;
  mprotect(reinterpret_cast<void*>(page), sysconf(_SC_PAGESIZE), PROT_READ);
}

// The engine must have gone backward once before: it starts its threads at the first time.
inline void accept_absent_card() {
  static bool is_done = false;
  if (is_done) return;
  answer_for_contexts();  // may raise, then again at the next estimate
  is_done = true;
  static c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  WithoutGil let_go;
  start_threads(torch::autograd::Engine::get_default_engine());
}

}  // namespace live
