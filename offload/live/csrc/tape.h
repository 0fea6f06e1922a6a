// A tape: the operations of one run of a step, in their order. Tapes that begin alike are one tree.
//
//   root - embedding - mm - relu - nll_loss - ...      a node is an operation, a leaf ends a tape
//                         '- abs - nll_loss - ...
//
// A tensor on a tape is a slot (its storage, numbered in the order of appearance) and a geometry.
// A pass is one run of the step along the tree: which storage each slot is, and every number.

#pragma once

#include <ATen/Dispatch_v2.h>
#include <ATen/ScalarOps.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/Scalar.h>

#include <cstring>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "storages.h"

namespace live {

struct Value {
  int slot;
  int id;  // among the values of its tape
  c10::DimVector sizes, strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
  DispatchKeySet keys;
  bool is_number;  // a number of Python's, which torch made a tensor of
  size_t nbytes;   // of the storage
  c10::Device device;

  bool fits(const c10::TensorImpl* tensor) const { return fits(tensor, tensor->storage_offset()); }
  bool fits(const c10::TensorImpl* tensor, int64_t at) const {
    return tensor->key_set() == keys && tensor->dtype() == dtype && at == offset &&
        tensor->sizes() == c10::IntArrayRef(sizes) && tensor->strides() == c10::IntArrayRef(strides);
  }
};

enum class Arg : uint8_t {
  tensor,
  undefined,
  tensors,        // a list, whose `count` elements are the arguments after it
  lists,          // the same of such lists: it is never deferred
  none,
  boolean,
  integer,        // decides shapes, so another one is another tape
  integers,
  count,          // a number: another one is the same tape
  real,
  reals,
  number,         // a number within a tensor of the host's
  constant,       // anything else that is compared by value
  opaque,         // a tensor that is more than bytes
};

struct Argument {
  Arg kind;
  bool written = false;
  int count = 0;           // of integers: which of the node's lists
  int64_t integer = 0;     // also: whether a list may have holes, whether a real is complex
  Value* value = nullptr;
  int constant = -1;       // index into the node's constants
};

enum class Out : uint8_t { fresh, alias, self, undefined, list, integer, other };

struct Output {
  Out kind;
  int count = 0;      // of `list`; of `integer`: which
  int argument = -1;  // of `self`: which flat argument
  Value* value = nullptr;
};

enum class Kind : uint8_t {
  root,
  deferred,     // a kernel; it runs later
  view,         // makes a tensor over the storage of an argument; nothing runs
  reshape,      // changes the shape of the argument itself; nothing runs
  synchronous,  // runs at once, after everything before it
};

// By node of a tape: the slots that no later node uses, and all values over them.
struct LastUses {
  std::vector<std::vector<int>> slots, values;
};

// What an operation did when it ran on stand-ins.
struct Tried {
  struct Event {  // as the allocator shim has it (memory/csrc/placed.h)
    uint64_t nbytes;  // 0: a free
    void* address;
  };
  std::vector<Event> events;
  std::vector<uint64_t> homes;  // by result: the address of its storage
  uint64_t elsewhere = 0;       // bytes that other threads allocated
  double seconds = 0;
};

struct Node {
  std::optional<OperatorHandle> op;
  const c10::FunctionSchema* schema = nullptr;
  DispatchKeySet keys;                             // what it is dispatched with, below us
  c10::impl::PODLocalDispatchKeySet dispatch{};    // the thread's keys
  bool grad = true;                                // whether autograd was on: some kernels ask
  caffe2::TypeMeta default_dtype;                  // of a result whose type nothing else decides
  bool backward = false;
  bool on_host = false;  // of single numbers on the CPU: runs at once
  Kind kind = Kind::root;
  bool random = false;
  std::vector<Argument> arguments;
  std::vector<IValue> constants;
  std::vector<std::vector<int64_t>> integers;
  std::vector<Output> outputs;
  int returns = 0;
  std::vector<c10::Scalar> numbers;  // as recorded
  size_t first_number = 0;           // among the numbers of its tape
  std::vector<std::unique_ptr<Value>> values;
  std::string where;  // the user's line
  std::shared_ptr<const Tried> tried;  // if its allocations were watched
  std::vector<std::unique_ptr<Node>> children;
  Node* parent = nullptr;
  int slots = 0, value_count = 0;             // up to here on its tape
  bool cut = false;                           // once a value was needed after it
  std::unique_ptr<LastUses> last_uses;        // of the tape that ends here

  Node() = default;
  Node(const Node&) = delete;
};

struct Pass {
  std::vector<Node*> path;
  std::vector<char> ran;  // by node: whether it ran on the user's side, at once
  std::vector<WeakStorage> bound;  // by slot; what the step made dies when the user drops it
  std::vector<Storage> outside;    // by slot: storages that the step was given, or made at once
  std::unordered_map<StorageImpl*, int> slot_of;
  std::unordered_map<int, Storage> copies;  // by slot: of memory that Python can write behind our back
  std::vector<c10::Scalar> numbers;
  std::vector<int> varied;  // the numbers that are not as recorded
  bool recorded = false;    // its tape ends with operations that no pass had before
  // While it is recorded:
  std::vector<std::vector<Value*>> values_of;  // by slot
  std::vector<char> on_host;                   // by slot: a single number on the CPU, never deferred
  std::unordered_map<const c10::FunctionSchema*, std::vector<const Node*>> recorded_by;
  // While it is executed:
  size_t done = 0;
  bool sets_flags = false;  // it has set one that all kernels go by
  bool as_issued = false;  // a part of it ran without a plan, so the rest does, too
  bool failed = false;
  std::vector<std::unique_ptr<Adopted>> crossed;  // by slot: made before a cut, used after it
  std::vector<Storage> real;
  std::vector<at::Tensor> tensors;  // by value

  // Everything is forgotten but the memory of the lists.
  void clear() {
    path.clear();
    ran.clear();
    bound.clear();
    outside.clear();
    slot_of.clear();
    copies.clear();
    numbers.clear();
    varied.clear();
    values_of.clear();
    on_host.clear();
    recorded_by.clear();
    real.clear();
    tensors.clear();
    crossed.clear();
    done = 0;
    recorded = sets_flags = as_issued = failed = false;
  }
};

using Passes = std::shared_ptr<std::vector<std::unique_ptr<Pass>>>;

// An empty pass, in the memory of one that is over: its lists are long.
inline std::shared_ptr<Pass> new_pass(const Passes& used_passes) {
  auto pass = used_passes->empty() ? std::make_unique<Pass>() : std::move(used_passes->back());
  if (!used_passes->empty()) used_passes->pop_back();
  return {pass.release(), [used_passes](Pass* used) {
            used->clear();
            used_passes->emplace_back(used);
          }};
}

inline Adopted* crossed_at(const Pass& pass, int slot) {
  return static_cast<size_t>(slot) < pass.crossed.size() ? pass.crossed[slot].get() : nullptr;
}

inline at::Tensor tensor_of(const Value& value, Storage storage) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(std::move(storage)), value.keys, value.dtype);
  auto* own = tensor.unsafeGetTensorImpl();
  own->set_sizes_and_strides(value.sizes, value.strides, value.offset);
  if (value.is_number) own->set_wrapped_number(true);
  return tensor;
}

// What Python computes with rather than a model: single numbers, and a few integers, such as lengths.
inline bool is_tiny(caffe2::TypeMeta dtype, size_t nbytes, c10::Device device) {
  const bool integers = at::isIntegralType(dtype.toScalarType(), /*includeBool=*/true);
  return device.is_cpu() && nbytes <= (integers ? 4096 : 16);
}

inline bool is_tiny(const at::Tensor& tensor) {
  const bool integers = at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
  return is_tiny(tensor.dtype(), storage_of(tensor)->nbytes(), tensor.device()) && (integers || tensor.numel() == 1);
}

// Calls `use` with the type of a tensor's elements, which a number can have.
#define LIVE_OF_TYPE(type, use) \
  AT_DISPATCH_V2(type, "number", AT_WRAP(use), AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX), at::kHalf, at::kBFloat16, at::kBool)

// Whether it can be read when an operation is issued: a number of Python's, or any of the host's.
inline bool is_number(const at::Tensor& tensor) {
  static constexpr DispatchKeySet LAZY({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});
  const auto type = tensor.scalar_type();
  const bool has_numbers = (type <= at::kBool && type != at::kComplexHalf) || type == at::kBFloat16;
  return tensor.dim() == 0 && tensor.is_cpu() && is_strided(tensor) && has_numbers && !tensor.key_set().has_any(LAZY) &&
      !is_barred(storage_of(tensor));
}

inline c10::Scalar number_in(const at::Tensor& tensor) {
  const void* data = tensor.unsafeGetTensorImpl()->data();
  return LIVE_OF_TYPE(tensor.scalar_type(), [&] { return c10::Scalar(*static_cast<const scalar_t*>(data)); });
}

// `of_python`: its type takes no part in the type of a result.
inline at::Tensor number_tensor(const c10::Scalar& number, caffe2::TypeMeta dtype, bool of_python) {
  auto tensor = c10::scalar_to_tensor(number);
  if (tensor.dtype() != dtype) tensor = tensor.to(dtype.toScalarType());
  tensor.unsafeGetTensorImpl()->set_wrapped_number(of_python);
  return tensor;
}

// Numbers that print alike may differ, and a NaN is itself.
inline bool same_number(const c10::Scalar& one, const c10::Scalar& other) {
  if (one.type() != other.type()) return false;
  if (one.isComplex()) {
    const auto a = one.toComplexDouble(), b = other.toComplexDouble();
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
  if (one.isFloatingPoint()) {
    const double a = one.toDouble(), b = other.toDouble();
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
  return one.isBoolean() ? one.toBool() == other.toBool() : one.toLong() == other.toLong();
}

}  // namespace live
