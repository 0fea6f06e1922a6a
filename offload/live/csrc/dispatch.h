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

struct Operator {
  bool composite;     // its parts arrive here one by one
  bool synchronous;   // Python, or the shape of its result, needs a value: it cannot wait
  bool random;
  bool exact;         // its numbers decide the shape of its result
  bool inplace_view;  // it changes the shape of its argument, and no byte
  bool unseen;        // it does nothing that counts: it profiles, or waits for what other processes have sent
  bool looks;         // it reads no byte: its result is its argument once more
  bool keeps_seeds;   // on the host (seeds.h)
  bool collective;    // other processes do it, too
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
  static const std::unordered_set<std::string> COLLECTIVE = {
      "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "fsdp", "symm_mem",
  };
  static const std::unordered_set<std::string> WAITING = {
      "_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors",
      "c10d_functional::wait_tensor",
  };
  static const std::unordered_set<std::string> EXACT = {"aten::arange", "aten::range", "aten::linspace"};
  const auto& schema = op.schema();
  if (auto found = operators.find(&schema); found != operators.end()) return found->second;
  const auto& name = schema.name();
  Operator known{};
  known.unseen = name.rfind("profiler::", 0) == 0 || WAITING.count(name);
  known.collective = !known.unseen && COLLECTIVE.count(name.substr(0, name.find("::")));
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
