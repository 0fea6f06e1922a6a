// Operations that several processes do together. All ranks must begin the same ones in the same order, so
// each waits for its turn like any other kernel, and nothing is sent while a step is recorded.

#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "session.h"

namespace live {

// What a deferred collective returns: whoever uses its tensors waits for it by itself.
struct FinishedWork : c10d::Work {
  explicit FinishedWork(std::vector<at::Tensor> made) : made(std::move(made)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return made; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(made);
    return future;
  }
  std::vector<at::Tensor> made;
};

// The results of a collective that writes an argument: that argument, a Work, or both.
inline void push_written(const Node& node, Stack* stack, at::ArrayRef<IValue> given) {
  const IValue written = given[node.in_place];
  torch::jit::drop(*stack, given.size());
  for (const auto& result : node.schema->returns()) {
    if (result.type()->kind() != c10::TypeKind::ClassType) {
      stack->push_back(written);
      continue;
    }
    std::vector<at::Tensor> tensors;
    each_tensor(written, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    stack->emplace_back(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<FinishedWork>(std::move(tensors))));
  }
}

// Wait for the others: what a collective returns may be there later.
inline void wait_for_ranks(const OperatorHandle& op, const Stack& stack) {
  if (known(op).ranks == Ranks::alone) return;
  static const auto wait = c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::wait_tensor", "");
  static const auto work = c10::getCustomClassType<c10::intrusive_ptr<c10d::Work>>();
  WithoutGil let_go;
  for (size_t n = stack.size() - op.schema().returns().size(); n < stack.size(); n++) {
    if (stack[n].isObject() && stack[n].type() == work) stack[n].toCustomClass<c10d::Work>()->wait();
    each_tensor(stack[n], [&](const at::Tensor& tensor) {
      WithoutKey off;
      Stack one{tensor};
      wait.callBoxed(one);
    });
  }
}

inline void run_at_once(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  run_now(op, keys, stack);
  wait_for_ranks(op, *stack);
}

// Whether it is the same group of processes, or the same kind of sum.
inline bool same_object(const IValue& one, const IValue& other) {
  static const auto reduction = c10::getCustomClassType<c10::intrusive_ptr<c10d::ReduceOp>>();
  if (one.type() != other.type()) return false;
  if (one.type() == reduction) {
    const auto a = one.toCustomClass<c10d::ReduceOp>(), b = other.toCustomClass<c10d::ReduceOp>();
    return a->op_ == b->op_ && a->supplement_ == b->supplement_;
  }
  return one.toObjectRef().getSlot(0).toCapsule() == other.toObjectRef().getSlot(0).toCapsule();
}

}  // namespace live
