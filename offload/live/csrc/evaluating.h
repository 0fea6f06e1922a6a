// A value that a step of an estimate asks for, if it depends on nothing but its batch and what its code writes
// down, such as whether a mask hides anything. Only the operations that it depends on run, on the CPU.

#pragma once

#include "executing.h"
#include "stand_ins.h"

namespace live {

class Evaluation {
 public:
  explicit Evaluation(Pass& pass) : pass_(pass) {}

  // Compute these slots. False: they depend on weights, or on anything else that has no bytes.
  bool compute(std::set<int> slots) {
    std::vector<const Node*> needed;
    for (size_t n = pass_.path.size(); n-- > 0;) {
      const Node& node = *pass_.path[n];
      if (!std::any_of(node.outputs.begin(), node.outputs.end(), [&](const Output& one) { return one.value && slots.count(one.value->slot); }) &&
          !std::any_of(node.arguments.begin(), node.arguments.end(), [&](const Argument& one) { return one.written && one.value && slots.count(one.value->slot); })) {
        continue;
      }
      if (!pass_.ran[n]) needed.push_back(&node);
      for (const auto& argument : node.arguments) {
        if (argument.kind == Arg::opaque) return false;
        if (argument.kind == Arg::tensor) slots.insert(argument.value->slot);
      }
    }
    WithoutKey off;
    for (const int slot : slots) {
      if (pass_.outside[slot] && !take_given(slot)) return false;
    }
    const WithoutDraws kept(std::any_of(needed.begin(), needed.end(), [](const Node* node) { return node->random; }));
    ThreadState state;
    for (auto node = needed.rbegin(); node != needed.rend(); ++node) run(**node);
    return true;
  }

  at::Tensor tensor(const Value& value) {
    if (const auto made = made_.find(value.id); made != made_.end()) return made->second;
    const auto key = c10::computeDispatchKey(value.dtype.toScalarType(), c10::kStrided, c10::kCPU);
    auto one = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(real_.at(value.slot)), DispatchKeySet(key), value.dtype);
    one.unsafeGetTensorImpl()->set_sizes_and_strides(value.sizes, value.strides, value.offset);
    return one;
  }

 private:
  // A copy: an operation of the step may write it.
  bool take_given(int slot) {
    auto* storage = pass_.outside[slot].get();
    const auto known = session().known.find(storage);
    if (known != session().known.end()) storage = storage_of(known->second);
    else if (is_barred(storage) || !storage->device().is_cpu()) return false;
    real_[slot] = share(storage_of(as_bytes(share(storage)).clone()));
    return true;
  }

  void run(const Node& node) {
    Stack stack;
    Numbers numbers{pass_.numbers, node.first_number};
    const Argument* end = node.arguments.data() + node.arguments.size();
    for (const Argument* next = node.arguments.data(); next < end;) {
      if (next->kind == Arg::tensors) {
        stack.push_back(tensors(next));
        continue;
      }
      const auto& argument = *next++;
      stack.push_back(argument.kind == Arg::tensor ? IValue(tensor(*argument.value)) : real_argument(pass_, node, argument, numbers));
      if (stack.back().isDevice()) stack.back() = c10::Device(c10::kCPU);
    }
    node.op->redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    size_t result = stack.size() - node.returns;
    for (size_t n = 0; n < node.outputs.size(); result++) {
      const auto& output = node.outputs[n++];
      if (output.kind == Out::list) {
        for (const auto& made : stack[result].toTensorVector()) take(node.outputs[n++], made);
      } else if (stack[result].isTensor()) {
        take(output, stack[result].toTensor());
      }
    }
  }

  IValue tensors(const Argument*& next) {
    const auto& head = *next++;
    c10::List<std::optional<at::Tensor>> some;
    c10::List<at::Tensor> all;
    for (int n = 0; n < head.count; n++, next++) {
      const bool there = next->kind == Arg::tensor;
      if (head.integer != 0) some.push_back(there ? std::optional(tensor(*next->value)) : std::nullopt);
      else all.push_back(there ? tensor(*next->value) : at::Tensor());
    }
    return head.integer != 0 ? IValue(std::move(some)) : IValue(std::move(all));
  }

  void take(const Output& output, const at::Tensor& made) {
    if (!output.value) return;
    made_[output.value->id] = made;
    real_[output.value->slot] = share(storage_of(made));
  }

  Pass& pass_;
  std::unordered_map<int, Storage> real_;      // by slot
  std::unordered_map<int, at::Tensor> made_;   // by value
};

// Run an operation that asks for values, if they can be computed. False: they cannot.
inline bool run_evaluated(const Node& node, const OperatorHandle& op, Stack* stack) {
  std::set<int> slots;
  for (const auto& argument : node.arguments) {
    if (argument.kind == Arg::tensors || argument.kind == Arg::lists || argument.kind == Arg::opaque) return false;
    if (argument.kind == Arg::tensor) slots.insert(argument.value->slot);
  }
  for (const auto& result : op.schema().returns()) {
    if (result.type()->kind() == c10::TypeKind::TensorType) return false;
  }
  Evaluation evaluation(*session().pass);
  if (!evaluation.compute(std::move(slots))) return false;
  const size_t first = stack->size() - node.arguments.size();
  for (size_t n = 0; n < node.arguments.size(); n++) {
    if (node.arguments[n].kind == Arg::tensor) (*stack)[first + n] = evaluation.tensor(*node.arguments[n].value);
  }
  WithoutKey off;
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  return true;
}

}  // namespace live
