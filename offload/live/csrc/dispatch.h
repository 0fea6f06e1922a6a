// The dispatch key that sees every operation below autograd, and what we know of an operator.
//
// `Fake` lies below autograd, autocast and functorch, and above BackendSelect, so that factories
// arrive. If a version of PyTorch registers a fallback there itself, ours fails aloud (live.cpp).

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace live {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using Stack = torch::jit::Stack;

constexpr DispatchKey KEY = DispatchKey::Fake;

inline DispatchKeySet keys_below(DispatchKeySet keys) {
  return keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, KEY);
}

// Within it operations run as they do without us.
struct WithoutKey {
  c10::impl::ExcludeDispatchKeyGuard guard{KEY};
};

inline void run_now(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  WithoutKey off;
  op.redispatchBoxed(keys_below(keys), stack);
}

// How an operation works together with other processes.
enum class Ranks : uint8_t {
  alone,
  makes,    // new tensors
  writes,   // what its schema says, or else its first argument
  at_once,  // Python waits for it, or its schema does not say what it writes
  over,     // waits for an operation that has ended by then
  pairs,    // in no order that all ranks share
};

inline Ranks ranks_of(const c10::FunctionSchema& schema) {
  using Names = std::unordered_set<std::string>;
  static const Names AT_ONCE = {"_dtensor", "c10d_functional", "fsdp", "symm_mem"};
  static const Names OVER = {"wait_tensor", "wait_tensors", "_wrap_tensor_autograd"};
  static const Names PAIRS = {"send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops"};
  const auto& name = schema.name();
  const auto space = name.substr(0, name.find("::")), own = name.substr(space.size() + 2);
  if (AT_ONCE.count(space)) return Ranks::at_once;
  if (space == "offload_ranks") return Ranks::writes;  // trainers/offloading/ranks.py
  if (space != "c10d" && space != "_c10d_functional") return Ranks::alone;
  if (OVER.count(own)) return Ranks::over;
  if (PAIRS.count(own)) return Ranks::pairs;
  if (own.find("barrier") != std::string::npos) return Ranks::at_once;
  return space == "c10d" || schema.is_mutable() ? Ranks::writes : Ranks::makes;
}

struct Operator {
  bool composite;     // its parts arrive here one by one
  bool synchronous;   // Python, or the shape of its result, needs a value: it cannot wait
  bool random;
  bool exact;         // its numbers decide the shape of its result
  bool inplace_view;  // it changes the shape of its argument, and no byte
  bool unseen;        // it does nothing that counts
  bool looks;         // it reads no byte: its result is its argument once more
  bool keeps_seeds;   // on the host (seeds.h)
  Ranks ranks;
};

inline bool returns_tensors_only(const c10::FunctionSchema& schema) {
  const bool is_attention = schema.name().find("attention") != std::string::npos;
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    const bool is_integer = kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType;
    if (is_integer && is_attention) continue;  // the shapes of its arguments decide it
    const bool tensors = kind == c10::TypeKind::ListType &&
        result.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::OptionalType && !tensors) return false;
  }
  return true;
}

inline const Operator& traits_of(const OperatorHandle& op) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Operator> operators;
  static const std::unordered_set<std::string> SYNCHRONOUS = {
      "aten::_pack_padded_sequence", "aten::_ctc_loss", "aten::set_", "aten::resize_", "aten::resize_as_",
      "aten::_linalg_check_errors",  // the user's `try` is around it
  };
  static const std::unordered_set<std::string> EXACT = {"aten::arange", "aten::range", "aten::linspace"};
  const auto& schema = op.schema();
  if (auto found = operators.find(&schema); found != operators.end()) return found->second;
  const auto& name = schema.name();
  Operator known{};
  known.ranks = ranks_of(schema);
  known.unseen = name.rfind("profiler::", 0) == 0 || known.ranks == Ranks::over;
  known.looks = name == "aten::detach";
  known.composite = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
      !op.hasKernelForDispatchKey(DispatchKey::CPU) && !op.hasKernelForDispatchKey(DispatchKey::CUDA) &&
      !op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
  known.keeps_seeds = name.find("efficient_attention") != std::string::npos;
  known.random = op.hasTag(at::Tag::nondeterministic_seeded);
  known.synchronous = op.hasTag(at::Tag::data_dependent_output) || SYNCHRONOUS.count(name) ||
      (op.hasTag(at::Tag::dynamic_output_shape) && name != "aten::index") || !returns_tensors_only(schema);
  const auto& given = schema.arguments();
  const bool writes = std::any_of(given.begin(), given.end(), [](const c10::Argument& one) {
    return one.alias_info() && one.alias_info()->isWrite();
  });
  known.synchronous |= schema.returns().empty() && !writes && !known.random;  // all that it can do is raise
  if (known.ranks != Ranks::alone) known.synchronous = known.ranks == Ranks::at_once;
  known.exact = EXACT.count(name) > 0;
  known.inplace_view = op.hasTag(at::Tag::inplace_view) && !known.synchronous;
  return operators.emplace(&schema, known).first->second;
}

// Batch norms write their statistics, and their schemas do not say so.
inline bool is_statistic(const std::string& op, const std::string& argument) {
  return op.find("batch_norm") != std::string::npos && op.find("backward") == std::string::npos &&
      (argument == "running_mean" || argument == "running_var");
}

inline std::string full_name(const c10::FunctionSchema& schema) {
  const auto& overload = schema.overload_name();
  return schema.name() + "." + (overload.empty() ? "default" : overload);
}

// ---- the arguments of a call ----------------------------------------------------------------------

inline at::ArrayRef<IValue> arguments_of(const OperatorHandle& op, const Stack* stack) {
  const size_t count = op.schema().arguments().size();
  return at::ArrayRef<IValue>(stack->data() + stack->size() - count, count);
}

template <class F>
void each_tensor(const IValue& value, F&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) {
      if (element.isTensor() ? element.toTensor().defined() : element.isList()) each_tensor(element, visit);
    }
  }
}

template <class F>
void each_tensor(at::ArrayRef<IValue> values, F&& visit) {
  for (const auto& value : values) each_tensor(value, visit);
}

}  // namespace live
