// Any op of aten: its CPU kernel runs over the device's memory, and its results get memory of the
// device. Where the work is deferred, a run over zeros tells shapes and dtypes of the results
// beforehand. Ops that tell the host a value, or whose shapes depend on values, wait for the
// stream.
#pragma once

#include <memory>
#include <optional>

#include "draws.h"
#include "dtypes.h"
#include "schemas.h"

namespace fake_ops {

using c10::IValue;

// The value with each of its tensors changed, the CPU in place of a device, and no generator.
template <class Change>
IValue with_tensors(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(at::kCPU);
  if (value.isGenerator()) return IValue();
  return value;
}

template <class Change>
Stack all_with_tensors(const Stack& values, Change change) {
  Stack changed;
  for (const auto& value : values) changed.push_back(with_tensors(value, change));
  return changed;
}

template <class Visit>
void each_tensor(const IValue& value, Visit visit) {
  with_tensors(value, [&](const Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

inline Tensor numbered_like(Tensor made, const Tensor& tensor) {
  const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (number) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// For work that runs later: the host may change its tensors meanwhile.
inline Tensor kept(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return on_cpu(tensor);
  return numbered_like(tensor.clone(), tensor);
}

// For a run that only tells shapes.
inline Tensor zeros_like_it(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return kept(tensor);
  auto options = tensor.options().device(at::kCPU);
  return numbered_like(at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_(),
                       tensor);
}

inline Tensor memory_for(const Tensor& result) {
  if (!result.defined()) return result;
  const c10::Device here(at::kCUDA, c10::cuda::current_device());
  return at::empty_strided(result.sizes(), result.strides(), result.options().device(here));
}

// One call of an op.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments)
      : op_(op), facts_(facts_of(op)), arguments_(std::move(arguments)) {}

  void run(Stack* stack) {
    c10::cuda::OptionalCUDAGuard guard;
    if (auto device = device_of()) guard.set_device(*device);
    if (!deferred()) {
      run_now(stack);
    } else if (host_waits()) {
      c10::cuda::getCurrentCUDAStream().synchronize();
      run_now(stack);
    } else {
      run_later(stack);
    }
  }

 private:
  std::optional<c10::Device> device_of() const {
    std::optional<c10::Device> found;
    for (const auto& value : arguments_) {
      each_tensor(value, [&](const Tensor& tensor) {
        if (!found && tensor.is_cuda()) found = tensor.device();
      });
      if (!found && value.isDevice() && value.toDevice().is_cuda()) found = value.toDevice();
    }
    return found;
  }

  Draw draw_of() const {
    if (!facts_.random) return {};
    for (const auto& value : arguments_) {
      if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
        return draw_from(at::check_generator<at::CUDAGeneratorImpl>(value.toGenerator()));
      }
    }
    return draw_on(c10::cuda::current_device());
  }

  bool host_waits() const {
    bool waits = facts_.host_waits;
    for (size_t i : facts_.written) {
      if (!arguments_[i].isTensor()) continue;
      each_tensor(arguments_[i], [&](const Tensor& tensor) { waits |= !tensor.is_cuda(); });
    }
    for (const auto& value : arguments_) {
      if (!value.isOptionalTensorList() && !(facts_.indexes && value.isTensorList())) continue;
      each_tensor(value, [&](const Tensor& tensor) {
        waits |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      });
    }
    return waits;
  }

  void run_now(Stack* stack) {
    const Draw draw = draw_of();
    Stack work = all_with_tensors(arguments_, on_cpu);
    const Tensors outs = replace_outs(facts_, work);
    run_cpu(op_, facts_, arguments_, work, draw);
    fill(memory_of_outs(outs), outs);
    const auto memory = push_results(stack, work);
    fill_results(memory, work);
  }

  void run_later(Stack* stack) {
    Stack told;
    Tensors told_outs;
    if (facts_.makes_results || !facts_.outs.empty()) {
      told = all_with_tensors(arguments_, zeros_like_it);
      told_outs = replace_outs(facts_, told);
      run_cpu(op_, facts_, arguments_, told, Draw{});
    }
    auto arguments = std::make_shared<Stack>(all_with_tensors(arguments_, kept));
    auto scalars = std::make_shared<Stack>(
        all_with_tensors(arguments_, [](const Tensor&) { return Tensor(); }));
    const Tensors out_memory = memory_of_outs(told_outs);
    const auto memory = push_results(stack, told);
    // Last, as kernels do: a generator may take memory too.
    const Draw draw = draw_of();
    auto work = [op = op_, &facts = facts_, draw, arguments, scalars, out_memory, memory] {
      Stack work = *arguments;
      const Tensors outs = replace_outs(facts, work);
      run_cpu(op, facts, *scalars, work, draw);
      fill(out_memory, outs);
      fill_results(memory, work);
    };
    launch(work, facts_.name.c_str());
  }

  static void run_cpu(const c10::OperatorHandle& op, const Facts& facts, const Stack& arguments,
                      Stack& work, const Draw& draw) {
    as_cpu_takes(facts.name, work);
    for (size_t i : facts.generators) work[i] = generator_of(draw);
    if (facts.name == NATIVE_DROPOUT) {
      native_dropout(work, generator_of(draw));
    } else {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &work);
    }
    as_cuda_gives(facts.name, arguments, work);
  }

  // Puts an empty tensor in the place of each out, which the kernel resizes.
  static Tensors replace_outs(const Facts& facts, Stack& work) {
    Tensors outs;
    for (size_t i : facts.outs) {
      if (!work[i].isTensor()) continue;
      outs.push_back(at::empty({0}, work[i].toTensor().options()));
      work[i] = outs.back();
    }
    return outs;
  }

  // Resizes the call's outs as these were, and returns the CPU's tensors over their memory.
  Tensors memory_of_outs(const Tensors& told) const {
    Tensors memory;
    for (size_t i : facts_.outs) {
      if (!arguments_[i].isTensor()) continue;
      const Tensor out = arguments_[i].toTensor();
      const auto sizes = told[memory.size()].sizes();
      if (out.sizes() != sizes) out.resize_(sizes);
      memory.push_back(on_cpu(out));
    }
    return memory;
  }

  // Pushes what the call returns: arguments, new memory, and what is no tensor. Returns, by
  // result, the CPU's tensors over new memory.
  std::vector<Tensors> push_results(Stack* stack, const Stack& results) const {
    std::vector<Tensors> memory(facts_.argument_of.size());
    for (size_t i = 0; i < memory.size(); ++i) {
      if (facts_.argument_of[i] != Facts::NEW) {
        stack->push_back(arguments_[facts_.argument_of[i]]);
        continue;
      }
      stack->push_back(with_tensors(results[i], [&](const Tensor& result) {
        const Tensor made = memory_for(result);
        memory[i].push_back(on_cpu(made));
        return made;
      }));
    }
    return memory;
  }

  static void fill(const Tensors& memory, const Tensors& values) {
    for (size_t i = 0; i < memory.size(); ++i) {
      const Tensor& to = memory[i];
      if (to.defined() && to.numel()) to.copy_(values[i]);
    }
  }

  static void fill_results(const std::vector<Tensors>& memory, const Stack& results) {
    for (size_t i = 0; i < memory.size(); ++i) {
      if (memory[i].empty()) continue;
      fill(memory[i],
           results[i].isTensor() ? Tensors{results[i].toTensor()} : results[i].toTensorVector());
    }
  }

  const c10::OperatorHandle op_;
  const Facts& facts_;
  const Stack arguments_;
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  static const bool tell = std::getenv("FAKE_CUDA_OPS") != nullptr;
  const Facts& facts = facts_of(op);
  if (tell) std::fprintf(stderr, "[fakecuda] %s\n", facts.name.c_str());
  Stack arguments(stack->end() - facts.arguments, stack->end());
  torch::jit::drop(*stack, facts.arguments);
  Call(op, std::move(arguments)).run(stack);
}

}  // namespace fake_ops
