// Storages without bytes. Reading one throws until its bytes are there.
//
//   shadow    what an operation made that has not run yet: a kernel makes its bytes later
//   adopted   a storage of the user's whose bytes live at a home of ours, and come when somebody looks
//   pending   a storage of the user's that waits for a write
//
// The StorageImpl is the identity: every tensor over it, whoever holds it, sees its bytes come and go.

#pragma once

#include <ATen/SparseTensorImpl.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "threads.h"

namespace live {

using c10::StorageImpl;
using Storage = c10::intrusive_ptr<StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<StorageImpl>;

inline Storage share(StorageImpl* storage) { return Storage::reclaim_copy(storage); }
inline WeakStorage weak(StorageImpl* storage) { return WeakStorage(share(storage)); }
inline void* address_of(StorageImpl* storage) { return storage->_mutable_data_ptr_no_checks().get(); }

inline StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Whether a tensor is of a class of Python's that sees its operations: it may stand for other tensors.
inline bool is_wrapper(const at::Tensor& tensor) { return tensor.key_set().has(DispatchKey::Python); }

// Whether a tensor is bytes in a storage, and nothing else.
inline bool is_strided(const at::Tensor& tensor) {
  return !is_wrapper(tensor) && tensor.layout() == c10::kStrided && tensor.unsafeGetTensorImpl()->has_storage() &&
      !tensor.is_quantized() && !tensor.is_nested() && !tensor.is_mkldnn();
}

template <class F>
void each_storage(const at::Tensor& tensor, F&& visit) {
  if (tensor.layout() == c10::kStrided) {
    if (tensor.unsafeGetTensorImpl()->has_storage()) visit(storage_of(tensor));
  } else if (tensor.layout() == c10::kSparse) {
    auto* sparse = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
    for (const auto& part : {sparse->indices(), sparse->values()}) {
      if (part.defined() && part.unsafeGetTensorImpl()->has_storage()) visit(storage_of(part));
    }
  }
}

template <class F>
void each_storage(at::ArrayRef<IValue> values, F&& visit) {
  each_tensor(values, [&](const at::Tensor& tensor) { each_storage(tensor, visit); });
  for (const auto& value : values) {
    if (value.isStorage()) visit(value.toStorage().unsafeGetStorageImpl());
  }
}

// ---- what a storage without bytes knows -----------------------------------------------------------

struct Adopted {
  int id;
  WeakStorage user;
  at::Tensor home;      // all its bytes, as uint8; a plan moves it
  bool copied = false;  // the user's storage shows a copy: the home is on another device, or may move
};

struct Absent {
  Adopted* adopted;  // whose bytes they are; null for a shadow
  Session* owner;    // who knows when they come; null if they never do
};

inline void drop_absent(void* absent) { delete static_cast<Absent*>(absent); }
inline void drop_share(void* storage) { delete static_cast<Storage*>(storage); }

inline Absent* absent_of(StorageImpl* storage) {
  auto& data = storage->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &drop_absent ? static_cast<Absent*>(data.get_context()) : nullptr;
}

// PyTorch 2.11 can bar a storage from being read, and has no function to ask for that or to take it back.
// Its flag is private: an explicit instantiation may name it. A version without the flag does not compile.
template <auto Flag>
struct Reach {
  friend bool& barred(StorageImpl& storage) { return storage.*Flag; }
};
template struct Reach<&StorageImpl::throw_on_immutable_data_ptr_>;
bool& barred(StorageImpl& storage);

inline bool is_barred(StorageImpl* storage) { return barred(*storage); }

inline constexpr const char* NOT_THERE =
    "the bytes of this tensor are not there yet: the step that makes them has not ended. Only torch's own"
    " operators, on the thread of the step, can wait for them. DistributedDataParallel is none of them: a plan is of one process";

// Raises if the bytes are barred by the session of another thread.
inline void check_own(StorageImpl* storage);

inline void unbar(StorageImpl* storage) {
  barred(*storage) = false;
  auto data = std::move(storage->_mutable_data_ptr_no_checks());
  storage->set_data_ptr_noswap(std::move(data));  // which asks for the flag anew
}

inline void bar(StorageImpl* storage) {
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(NOT_THERE));
}

// `from`'s bytes, which live as long as anybody has them.
inline c10::DataPtr borrow(const Storage& from, void* address, c10::Device device) {
  return c10::DataPtr(address, new Storage(from), &drop_share, device);
}

inline Storage storage_over(c10::DataPtr data, size_t nbytes, c10::Allocator* allocator = nullptr) {
  return c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), static_cast<int64_t>(nbytes), std::move(data), allocator,
      allocator != nullptr);
}

inline Storage make_shadow(size_t nbytes, c10::Device device) {
  auto shadow = storage_over(c10::DataPtr(nullptr, new Absent{nullptr, current}, &drop_absent, device), nbytes);
  bar(shadow.get());
  return shadow;
}

inline at::Tensor as_bytes(Storage storage) {
  const auto nbytes = static_cast<int64_t>(storage->nbytes());
  const auto key = c10::computeDispatchKey(c10::kByte, c10::kStrided, storage->device());
  auto bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), DispatchKeySet(key), caffe2::TypeMeta::Make<uint8_t>());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  return bytes;
}

// ---- bytes go and come ----------------------------------------------------------------------------

// Take the bytes from an adopted storage. What somebody wrote into a copy of them goes home first.
inline void hide(StorageImpl* storage, Adopted& adopted) {
  if (adopted.copied && address_of(storage) && !absent_of(storage)) {
    WithoutKey off;
    adopted.home.copy_(as_bytes(share(storage)));
  }
  adopted.copied = false;
  auto* absent = new Absent{&adopted, session_here()};
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, absent, &drop_absent, storage->device()));
  bar(storage);
}

// Give the bytes of a user's storage to a home of ours.
inline std::unique_ptr<Adopted> adopt(StorageImpl* storage, int id) {
  auto data = storage->set_data_ptr(c10::DataPtr(nullptr, storage->device()));
  auto bytes = storage_over(std::move(data), storage->nbytes(), storage->allocator());
  auto adopted = std::make_unique<Adopted>(Adopted{id, weak(storage), as_bytes(std::move(bytes))});
  hide(storage, *adopted);
  return adopted;
}

// Adopted storages that show their bytes.
inline std::vector<Adopted*>& shown();

inline void show(StorageImpl* storage, Adopted& adopted) {
  WithoutKey off;
  shown().push_back(&adopted);
  const auto device = storage->device();
  adopted.copied = adopted.home.device() != device;
  const at::Tensor there = adopted.copied ? adopted.home.to(device) : adopted.home;
  storage->set_data_ptr_noswap(borrow(share(storage_of(there)), there.mutable_data_ptr(), device));
  unbar(storage);
}

// Give an adopted storage memory of its own, with the bytes that it shows.
inline void copy_shown(StorageImpl* storage, Adopted& adopted) {
  if (absent_of(storage)) show(storage, adopted);
  if (std::exchange(adopted.copied, true)) return;
  WithoutKey off;
  const auto own = as_bytes(share(storage)).clone();
  auto* real = storage_of(own);
  storage->set_data_ptr_noswap(borrow(share(real), address_of(real), storage->device()));
  storage->set_allocator(real->allocator());
  storage->set_resizable(true);
}

inline void wait_for_step();

// Give a shadow its bytes.
inline void give(StorageImpl* shadow, const Storage& real) {
  if (!absent_of(shadow)) return;
  shadow->set_data_ptr_noswap(borrow(real, address_of(real.get()), shadow->device()));
  if (real->allocator()) {
    shadow->set_allocator(real->allocator());
    shadow->set_resizable(true);
  }
  unbar(shadow);
}

// Give a storage its bytes back. Whatever writes them has run.
inline void materialize(StorageImpl* storage) {
  check_own(storage);
  wait_for_step();
  auto* absent = absent_of(storage);
  if (absent && absent->adopted) return show(storage, *absent->adopted);
  TORCH_CHECK(
      !absent, "this tensor was made by a planned step, which did not keep its bytes: it is a gradient, or the"
      " step ended with an error. Read a gradient within its step");
  if (is_barred(storage)) unbar(storage);
}

// The bytes of a user's storage as a storage of ours, which can be read while the user's is barred.
inline Storage bytes_of(const Storage& storage) {
  check_own(storage.get());
  if (absent_of(storage.get())) materialize(storage.get());
  return storage_over(
      borrow(storage, address_of(storage.get()), storage->device()), storage->nbytes());
}

}  // namespace live
