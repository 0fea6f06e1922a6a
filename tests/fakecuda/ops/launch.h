// How an op runs over the memory of a fake device: a CPU tensor over the same memory stands for
// each of its tensors, and the work is put on the current stream. In order, where no capture goes
// on, it is done at once.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <vector>

#include "../runtime/from_ops.h"

namespace fake_ops {

using at::Tensor;
using Tensors = std::vector<Tensor>;

inline void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

inline bool capturing() { return fakecuda_capturing(current_stream()); }

// Whether work waits for its stream.
inline bool deferred() { return fakecuda_async() || capturing(); }

// The CPU's tensor over the memory of one of a device. Others are returned as they are.
inline Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto* inside = tensor.unsafeGetTensorImpl();
  Tensor made = tensor.numel() == 0 ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                                    : at::from_blob(inside->mutable_data(), tensor.sizes(),
                                                    tensor.strides(), options);
  if (tensor.is_conj()) made = at::_conj(made);
  if (tensor.is_neg()) made = at::_neg_view(made);
  if (inside->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Work is done as kernels are: without autograd, autocast, modes of Python and transforms.
inline void do_as_a_kernel(const std::function<void()>& work) {
  using Key = c10::DispatchKey;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({Key::Python, Key::PythonTLSSnapshot, Key::PreDispatch,
                           Key::FuncTorchDynamicLayerFrontMode}));
  work();
}

inline void launch(std::function<void()> work, const char* name) {
  using Work = std::function<void()>;
  auto call = [](void* kept) { do_as_a_kernel(*static_cast<Work*>(kept)); };
  auto drop = [](void* kept) { delete static_cast<Work*>(kept); };
  fakecuda_launch(current_stream(), call, new Work(std::move(work)), drop, name);
}

// Calls `work` with the CPU's tensors over the memory of these, now or on the stream.
template <class Work>
void run_over(const Tensors& tensors, Work work, const char* name) {
  Tensors same;
  for (const auto& tensor : tensors) same.push_back(on_cpu(tensor));
  if (deferred()) {
    launch([same, work]() mutable { work(same); }, name);
  } else {
    work(same);
  }
}

}  // namespace fake_ops
