// An operation runs on stand-ins to find out what it makes: tensors of the same geometry, over the same
// aliases, filled with ones and zeros. So a step is recorded without its bytes, and nothing of it has run.
// For an estimate they have no bytes either: they are on the device `meta`, where torch only finds geometry.

#pragma once

#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <ATen/Context.h>

#include <chrono>

#include "session.h"

namespace live {

// Large blocks come from the system and go back to it. In the heap they would leave holes, which what a tape
// keeps divides, and the heap would grow with every operation.
struct LargeBlocksApart {
#ifdef __GLIBC__
  LargeBlocksApart() { mallopt(M_MMAP_THRESHOLD, 256 << 10); }
  ~LargeBlocksApart() {
    static const char* asked = std::getenv("MALLOC_MMAP_THRESHOLD_");
    mallopt(M_MMAP_THRESHOLD, asked ? std::atoi(asked) : 32 << 20);  // what glibc raises it to by itself
  }
#endif
};

// The keys of a tensor like this one on another device.
inline DispatchKeySet keys_on(c10::Device device, const at::Tensor& tensor) {
  static constexpr DispatchKeySet LAZY({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});
  const auto key = c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, device);
  const auto probe = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage_over(c10::DataPtr(nullptr, device), 0)), DispatchKeySet(key), tensor.dtype());
  return probe.key_set() | (tensor.key_set() & LAZY);
}

class StandIns {
 public:
  // Note a tensor of a call. All of them are seen before the first stand-in is made.
  void see(const at::Tensor& tensor) {
    auto& seen = seen_[storage_of(tensor)];
    const auto* impl = tensor.unsafeGetTensorImpl();
    const int64_t size = tensor.dtype().itemsize();
    int64_t begin = impl->storage_offset() * size, end = begin;
    if (tensor.numel() > 0) {
      end += size;
      for (int64_t n = 0; n < tensor.dim(); n++) end += (tensor.size(n) - 1) * tensor.stride(n) * size;
    }
    seen.begin = seen.end ? std::min(seen.begin, begin) : begin;
    seen.end = std::max(seen.end, end);
  }

  at::Tensor make(const at::Tensor& tensor) {
    auto& found = made_[tensor.unsafeGetTensorImpl()];
    if (found.defined()) return found;
    auto& seen = seen_[storage_of(tensor)];
    const bool has_bytes = !session().estimates;
    if (!seen.storage) has_bytes ? allocate(seen, tensor) : claim(seen, tensor);
    const auto keys = has_bytes ? tensor.key_set() : keys_on(c10::kMeta, tensor);
    found = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(seen.storage), keys, tensor.dtype());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) found.unsafeGetTensorImpl()->set_wrapped_number(true);
    const auto offset = tensor.storage_offset() - seen.begin / static_cast<int64_t>(tensor.dtype().itemsize());
    found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), offset);
    return found;
  }

  // The storage that a result's storage stands for, and where its first byte is; null if it is new.
  std::pair<StorageImpl*, int64_t> original(const at::Tensor& result) const {
    for (const auto& [storage, seen] : seen_) {
      if (seen.storage.get() == storage_of(result)) return {storage, seen.begin};
    }
    return {nullptr, 0};
  }

 private:
  struct Seen {
    int64_t begin = 0, end = 0;  // the bytes that the call's tensors cover
    Storage storage;
  };

  // All of a storage, without bytes.
  static void claim(Seen& seen, const at::Tensor& tensor) {
    seen.begin = 0;
    seen.end = static_cast<int64_t>(storage_of(tensor)->nbytes());
    seen.storage = storage_over(c10::DataPtr(nullptr, c10::kMeta), seen.end, c10::GetAllocator(c10::kMeta));
  }

  // A small part of a large storage, such as a row of a data set, is not made with all the rest.
  static void allocate(Seen& seen, const at::Tensor& tensor) {
    const auto whole = static_cast<int64_t>(storage_of(tensor)->nbytes());
    seen.begin = seen.begin / 16 * 16;
    if (whole < (1 << 20) || 2 * (seen.end - seen.begin) > whole) {
      seen.begin = 0;
      seen.end = whole;
    }
    const auto type = tensor.scalar_type();
    const bool is_bool = type == at::kBool;
    const int64_t size = tensor.dtype().itemsize(), count = (seen.end - seen.begin + size - 1) / size;
    const auto filled = at::empty({count}, at::TensorOptions().dtype(type).device(tensor.device()));
    filled.fill_(at::isFloatingType(type) || at::isComplexType(type) || is_bool ? 1 : 0);
    seen.storage = share(storage_of(filled));
  }

  std::unordered_map<StorageImpl*, Seen> seen_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> made_;
};

// Watches what an operation allocates, if somebody asks for that.
class Watch {
 public:
  explicit Watch(Tried& tried) : tried_(tried) {
    if (session().watch) session().watch();
  }
  ~Watch() {
    tried_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    if (!session().watch) return;
    const auto count = session().watched(nullptr, 0, nullptr);
    tried_.events.resize(count + 1);  // watching ends when there is room, also if nothing was seen
    session().watched(tried_.events.data(), count, &tried_.elsewhere);
    tried_.events.pop_back();
  }

 private:
  Tried& tried_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Puts the generators back, so that what a stand-in draws changes no later draw.
class WithoutDraws {
 public:
  explicit WithoutDraws(bool random) {
    if (!random) return;
    keep(at::globalContext().defaultGenerator(c10::Device(c10::kCPU)));
    if (session().device != c10::kCPU && !session().estimates) {
      keep(at::globalContext().defaultGenerator(c10::Device(session().device, -1)));
    }
  }
  ~WithoutDraws() {
    for (auto& [generator, state] : states_) generator.set_state(state);
  }

 private:
  void keep(at::Generator generator) {
    auto state = generator.get_state();
    states_.emplace_back(std::move(generator), std::move(state));
  }

  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

}  // namespace live
