// What autograd knows of the user's tensors that a capture writes: afterwards it is what it was before, for
// nothing has been written.

#pragma once

#include <torch/csrc/autograd/variable.h>

#include "storages.h"

namespace live {

class History {
 public:
  explicit History(const at::Tensor& tensor) : tensor_(tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    if (!impl->is_inference()) version_ = impl->version_counter().current_version();
    if (const auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
      maker_ = meta->grad_fn_;
      number_ = meta->output_nr_;
      requires_grad_ = meta->requires_grad_;
    }
    if (const auto* view = view_of(tensor)) seen_ = view->get_attr_version();
  }

  void put_back() const {
    if (version_) {
      auto versions = tensor_.unsafeGetTensorImpl()->version_counter();
      versions.set_version(*version_);
    }
    if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor_)) {
      meta->grad_fn_ = maker_;
      meta->output_nr_ = number_;
      meta->requires_grad_ = requires_grad_;
    }
    if (auto* view = view_of(tensor_)) view->set_attr_version(seen_);
  }

  static torch::autograd::DifferentiableViewMeta* view_of(const at::Tensor& tensor) {
    auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
    return view && view->has_bw_view() ? view : nullptr;
  }

 private:
  at::Tensor tensor_;
  std::optional<uint32_t> version_;
  decltype(torch::autograd::AutogradMeta::grad_fn_) maker_;
  uint32_t number_ = 0, seen_ = 0;
  bool requires_grad_ = false;
};

using Histories = std::unordered_map<c10::TensorImpl*, History>;

// Before an operation writes it. What the step itself has made is nobody's afterwards.
inline void keep_history(Histories& all, const at::Tensor& tensor) {
  if (!is_strided(tensor)) return;
  const auto* absent = absent_of(storage_of(tensor));
  if (absent && !absent->adopted) return;
  all.try_emplace(tensor.unsafeGetTensorImpl(), tensor);
  if (const auto* view = History::view_of(tensor)) keep_history(all, view->get_backward_view().base_);
}

inline void keep_histories(Histories& all, const c10::FunctionSchema& schema, at::ArrayRef<IValue> given) {
  for (size_t n = 0; n < given.size(); n++) {
    const auto* alias = schema.arguments()[n].alias_info();
    if (alias && alias->isWrite()) each_tensor(given[n], [&](const at::Tensor& one) { keep_history(all, one); });
  }
}

}  // namespace live
