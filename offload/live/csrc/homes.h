// Whose bytes live at a home of ours, and for how long.
//
//   adopted   a storage of the user's, as long as it lives: a weight, a state
//   placed    the same, of a module that has never been on the device
//   crossed   what a step makes before a cut and uses after it, until the step is over

#pragma once

#include "executing.h"

namespace live {

// Adopted storages show no bytes any more. One that somebody has a pointer to is given up: it has memory of
// its own since then.
inline void hide_shown(Pass* pass) {
  for (auto* adopted : std::exchange(shown(), {})) {
    const auto user = adopted->user.lock();
    if (!user || absent_of(user.get())) continue;
    if (!is_exposed(user.get())) {
      hide(user.get(), *adopted);
    } else if (!session().adopted.erase(user.get())) {
      for (size_t slot = 0; slot < pass->crossed.size(); slot++) {
        if (pass->crossed[slot].get() != adopted) continue;
        pass->outside[slot] = user;
        pass->crossed[slot].reset();
      }
    }
  }
}

// Memory that torch has read from a file looks as if numpy had it. If this tensor alone has its storage, and
// nobody the tensor, it is the tensor's own. The caller has Python's object of the storage.
inline void claim(const at::Tensor& tensor) {
  if (!is_strided(tensor)) return;
  auto* storage = storage_of(tensor);
  auto* own = c10::GetCPUAllocator();
  if (!storage->device().is_cpu() || (storage->allocator() && storage->resizable())) return;
  const auto deleter = storage->_mutable_data_ptr_no_checks().get_deleter();
  if (deleter != own->raw_deleter() && deleter != c10::GetDefaultCPUAllocator()->raw_deleter()) return;
  if (tensor.storage().use_count() > 2) return;
  storage->set_allocator(own);
  storage->set_resizable(true);
}

// Take the bytes from a storage for good.
inline void drop_bytes(StorageImpl* storage) {
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, new Absent{nullptr, nullptr}, &drop_absent, storage->device()));
  bar(storage);
}

// Whether a storage has lost its bytes for good.
inline bool is_lost(StorageImpl* storage) {
  const auto* absent = absent_of(storage);
  const auto* here = session_here();
  return here && absent && !absent->adopted && !(here->pass && here->pass->slot_of.count(storage));
}

// The step is over: what was made before a cut and is still held has memory of its own, but what is in
// `dropped` has none, and what is in `stays` is adopted.
inline void finish(Pass& pass, const std::set<int>& dropped, const std::set<int>& stays) {
  for (size_t slot = 0; slot < pass.crossed.size(); slot++) {
    auto* crossed = pass.crossed[slot].get();
    const auto user = crossed ? crossed->user.lock() : nullptr;
    if (!user) continue;
    if (stays.count(static_cast<int>(slot))) {
      session().adopted[user.get()] = std::move(pass.crossed[slot]);
    } else if (dropped.count(static_cast<int>(slot))) {
      drop_bytes(user.get());
    } else {
      copy_shown(user.get(), *crossed);
    }
  }
  const auto is_over = [&](const Adopted* adopted) {
    return std::any_of(pass.crossed.begin(), pass.crossed.end(), [&](const auto& own) { return own.get() == adopted; });
  };
  if (!pass.crossed.empty()) shown().erase(std::remove_if(shown().begin(), shown().end(), is_over), shown().end());
  pass.crossed.clear();
}

// Forget the adopted storages of which this is so.
template <class F>
void give_up_if(F&& is_so) {
  auto& all = session().adopted;
  for (auto each = all.begin(); each != all.end();) {
    auto* adopted = each->second.get();
    if (!is_so(*adopted)) {
      ++each;
      continue;
    }
    shown().erase(std::remove(shown().begin(), shown().end(), adopted), shown().end());
    each = all.erase(each);
  }
}

// Whoever has bytes at one of these places, which are written next, gets memory of its own.
inline void vacate(const std::set<int>& places) {
  give_up_if([&](Adopted& adopted) {
    if (!places.count(adopted.id)) return false;
    if (const auto user = adopted.user.lock()) copy_shown(user.get(), adopted);
    return true;
  });
}

// The numbers of the adopted storages that are alive.
inline std::vector<int> adopted_ids() {
  give_up_if([](const Adopted& adopted) { return adopted.user.expired(); });
  std::vector<int> ids;
  for (const auto& [storage, adopted] : session().adopted) ids.push_back(adopted->id);
  return ids;
}

// A slot's bytes live at this home until the step is over.
inline void cross(Pass& pass, int slot, int id, at::Tensor home) {
  const auto storage = pass.bound[slot].lock();
  if (!storage) return;
  pass.crossed.resize(std::max<size_t>(pass.crossed.size(), pass.bound.size()));
  auto& crossed = pass.crossed[slot] = std::make_unique<Adopted>(Adopted{id, weak(storage.get()), std::move(home)});
  storage->set_data_ptr_noswap(
      c10::DataPtr(nullptr, new Absent{crossed.get(), session_here()}, &drop_absent, storage->device()));
  bar(storage.get());
}

// An adopted storage's number and home.
inline std::pair<int, at::Tensor> adopt_storage(Storage storage) {
  auto& now = session();
  TORCH_CHECK(!now.adopted.count(storage.get()), "this storage is adopted already");
  check_not_anothers(storage.get());
  if (is_barred(storage.get())) materialize(storage.get());
  auto& adopted = now.adopted[storage.get()] = adopt(storage.get(), now.next_adopted++);
  return {adopted->id, adopted->home};
}

// Adopt a slot's storage at a home that exists already. False: it has another size.
inline bool adopt_at(Pass& pass, int slot, int id, const at::Tensor& home) {
  const auto& storage = pass.outside[slot];
  if (home.nbytes() != storage->nbytes()) return false;
  check_not_anothers(storage.get());
  if (is_barred(storage.get())) materialize(storage.get());
  auto& adopted = session().adopted[storage.get()];
  adopted = std::make_unique<Adopted>(Adopted{id, weak(storage.get()), home, true});
  hide(storage.get(), *adopted);
  return true;
}

// Whether a tensor's storage has bytes of its own, which can go to a home.
inline bool can_adopt(const Pass& pass, const at::Tensor& tensor) {
  if (!is_strided(tensor) || is_tiny(tensor) || storage_of(tensor)->nbytes() == 0) return false;
  auto* storage = storage_of(tensor);
  const auto is_its = [&](const auto& crossed) { return crossed && crossed->user._unsafe_get_target() == storage; };
  return !absent_of(storage) && !session().adopted.count(storage) && !is_exposed(storage) &&
      std::none_of(pass.crossed.begin(), pass.crossed.end(), is_its);
}

// The tensor where its bytes are at home between two steps. Nothing is copied.
inline at::Tensor home_of(const at::Tensor& tensor) {
  TORCH_CHECK(!session().pass, "a tensor is at home between two steps only");
  auto* storage = storage_of(tensor);
  const auto found = session().adopted.find(storage);
  if (found == session().adopted.end() || is_exposed(storage)) return tensor;
  if (!absent_of(storage)) hide(storage, *found->second);
  WithoutKey off;
  const auto whole = found->second->home.view(tensor.scalar_type());
  return whole.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// The same tensors on a device, without bytes. Aliases stay aliases.
inline std::vector<at::Tensor> without_bytes(const std::vector<at::Tensor>& tensors, const std::string& device) {
  WithoutKey off;
  std::unordered_map<StorageImpl*, Storage> made;
  std::vector<at::Tensor> shadows;
  for (const auto& tensor : tensors) {
    auto& storage = made[storage_of(tensor)];
    if (!storage) storage = make_shadow(storage_of(tensor)->nbytes(), c10::Device(device));
    const auto key = c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, c10::Device(device));
    auto one = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), tensor.dtype());
    one.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    shadows.push_back(std::move(one));
  }
  return shadows;
}

// Have a leaf be another tensor, on whatever device, for all that hold it: with the other's version, and with
// an accumulator of gradients of its own. The second time it gets the former accumulator back, and its hooks.
inline void become(const at::Tensor& tensor, const at::Tensor& other) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->shallow_copy_from(other.getIntrusivePtr());
  impl->set_version_counter(other.unsafeGetTensorImpl()->version_counter());
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard<std::mutex> lock(meta->mutex_);
    std::swap(meta->grad_accumulator_, session().accumulators[impl].grad_accumulator_);
  }
}

struct Placed {
  int id;  // of its storage
  at::Tensor tensor, home;
};

// Tensors on a device whose bytes stay at home where the given ones' are. Aliases stay aliases.
inline std::vector<Placed> place(const std::vector<at::Tensor>& tensors, const std::string& device) {
  auto& now = session();
  const c10::Device there(device);
  WithoutKey off;
  std::unordered_map<StorageImpl*, std::pair<Storage, Adopted*>> made;
  std::vector<Placed> placed;
  for (const auto& tensor : tensors) {
    auto* from = storage_of(tensor);
    check_not_anothers(from);
    auto& [storage, adopted] = made[from];
    if (!storage) {
      storage = storage_over(c10::DataPtr(nullptr, there), from->nbytes(), c10::GetAllocator(there.type()));
      auto own = std::make_unique<Adopted>(Adopted{now.next_adopted++, weak(storage.get()), as_bytes(share(from))});
      adopted = own.get();
      hide(storage.get(), *adopted);
      now.adopted[storage.get()] = std::move(own);
    }
    const auto key = c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, there);
    auto one = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), tensor.dtype());
    one.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    placed.push_back({adopted->id, std::move(one), adopted->home});
  }
  return placed;
}

}  // namespace live
