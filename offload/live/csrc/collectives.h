// Operations that several processes do together. All ranks must begin the same ones in the same order, so
// each waits for its turn like any other kernel, and nothing is sent while a step is recorded.

#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "session.h"

namespace live {

// What a deferred collective returns. Whoever uses its tensors waits for it anyway.
struct FinishedWork : c10d::Work {
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return made->value().toTensorVector(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return made; }
  c10::intrusive_ptr<c10::ivalue::Future> made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
};

// The results of a collective that writes an argument: that argument, a Work, or both.
inline void push_written(const Node& node, Stack* stack, at::ArrayRef<IValue> given) {
  const IValue written = given[node.in_place];
  auto work = c10::make_intrusive<FinishedWork>();
  std::vector<at::Tensor> tensors;
  each_tensor(written, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  work->made->markCompleted(std::move(tensors));
  torch::jit::drop(*stack, given.size());
  for (const auto& result : node.schema->returns()) {
    const bool is_work = result.type()->kind() == c10::TypeKind::ClassType;
    stack->push_back(is_work ? IValue(c10::intrusive_ptr<c10d::Work>(work)) : written);
  }
}

// Wait for what a collective returns: it may not be there yet.
inline void wait_for_ranks(const OperatorHandle& op, const Stack& stack) {
  if (traits_of(op).ranks == Ranks::alone) return;
  static const auto wait = c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::wait_tensor", "");
  static const auto work = c10::getCustomClassType<c10::intrusive_ptr<c10d::Work>>();
  WithoutGil let_go;
  WithoutKey off;
  for (size_t n = stack.size() - op.schema().returns().size(); n < stack.size(); n++) {
    if (stack[n].isObject() && stack[n].type() == work) stack[n].toCustomClass<c10d::Work>()->wait();
    each_tensor(stack[n], [](const at::Tensor& tensor) {
      Stack one{tensor};
      wait.callBoxed(one);
    });
  }
}

// Whether it is the same group of processes, or the same kind of sum.
inline bool same_object(const IValue& one, const IValue& other) {
  static const auto reduction = c10::getCustomClassType<c10::intrusive_ptr<c10d::ReduceOp>>();
  if (one.type() != other.type()) return false;
  const auto held = [](const IValue& value) { return value.toObjectRef().getSlot(0).toCapsule(); };
  if (one.type() != reduction) return held(one) == held(other);
  const auto a = one.toCustomClass<c10d::ReduceOp>(), b = other.toCustomClass<c10d::ReduceOp>();
  return a->op_ == b->op_ && a->supplement_ == b->supplement_;
}

}  // namespace live
