// A kernel bound to its tensors: a call without arguments, which gives it the step's own numbers.

#pragma once

#include <c10/core/GradMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "seeds.h"
#include "session.h"

namespace live {

namespace py = pybind11;

inline py::object to_python(IValue value) {
  return py::reinterpret_steal<py::object>(torch::jit::toPyObject(std::move(value)).release());
}

// The numbers of the step that runs next.
struct StepNumbers {
  std::shared_ptr<Session> of = session().shared_from_this();  // keeps its tapes alive
  std::vector<c10::Scalar> now;
  void take(const Pass& pass) { now = pass.numbers; }
  const c10::Scalar& at(size_t index) const { return now.at(index); }
};

// A number that differs from step to step: where it stands among the arguments, and what is made of it.
struct Varying {
  size_t argument;
  int element;  // of a list; -1: it is the argument itself
  size_t index;
  std::optional<at::ScalarType> dtype;  // of the tensor that has it
};

// An update that runs on the host is given the host's tensors, and is the host's kernel.
inline DispatchKeySet keys_for(const Node& node, at::ArrayRef<IValue> given) {
  bool on_host = node.keys.has_backend(c10::BackendComponent::CUDABit);
  each_tensor(given, [&](const at::Tensor& tensor) { on_host &= tensor.is_cpu(); });
  if (!on_host) return node.keys;
  return node.keys.remove_backend(c10::BackendComponent::CUDABit) | DispatchKeySet(c10::BackendComponent::CPUBit);
}

// The argument after this one, and after its elements.
inline const Argument* after(const Argument* one) {
  const int elements = one->kind == Arg::tensors ? one->count : 0;
  one++;
  for (int n = 0; n < elements; n++) one = after(one);
  return one;
}

// Make the tensors lazy that are conjugated or negated when they are read, as few kernels allow: copies, products.
inline void read_lazily(const Node& node, std::vector<IValue>& given) {
  WithoutKey off;
  const Argument* known = node.arguments.data();
  for (auto& value : given) {
    if (known->kind == Arg::tensor) {
      if (known->value->keys.has(DispatchKey::Conjugate)) value = at::_conj(value.toTensor());
      if (known->value->keys.has(DispatchKey::Negative)) value = at::_neg_view(value.toTensor());
    }
    known = after(known);
  }
}

class BoundCall {
 public:
  BoundCall(
      const Node& node, const py::list& arguments, std::vector<Varying> varying,
      std::shared_ptr<StepNumbers> numbers)
      : op_(*node.op), grad_(node.grad), varying_(std::move(varying)), numbers_(std::move(numbers)) {
    const auto& schema = node.schema->arguments();
    for (size_t n = 0; n < schema.size(); n++) {
      arguments_.push_back(torch::jit::toIValue(arguments[n], schema[n].type()));
    }
    read_lazily(node, arguments_);
    for (const auto& one : varying_) {
      if (!one.dtype || one.element >= 0) continue;  // `write` puts the numbers of each step into it
      auto& given = arguments_[one.argument];
      const auto* like = given.toTensor().unsafeGetTensorImpl();
      given = number_tensor(numbers_->at(one.index), like->dtype(), like->is_wrapped_number());
    }
    keys_ = keys_for(node, arguments_);
    stack_.reserve(schema.size() + node.schema->returns().size());
  }

  // Without the interpreter's lock.
  void run() {
    stack_.assign(arguments_.begin(), arguments_.end());
    for (const auto& varying : varying_) put(varying);
    c10::AutoGradMode as_recorded(grad_);
    give_seeds(op_, stack_);
    op_.redispatchBoxed(keys_, &stack_);
    take_seeds(op_, stack_);
  }

  // What the kernel has returned. Either this or `drop_result` follows a run.
  py::object result() {
    if (stack_.size() == 1) {
      auto result = to_python(std::move(stack_[0]));
      stack_.clear();
      return result;
    }
    py::tuple results(stack_.size());
    for (size_t n = 0; n < stack_.size(); n++) results[n] = to_python(std::move(stack_[n]));
    stack_.clear();
    return results;
  }
  void drop_result() { stack_.clear(); }

 private:
  void put(const Varying& varying) {
    const auto& number = numbers_->at(varying.index);
    if (varying.dtype && varying.element < 0) return write(stack_[varying.argument].toTensor(), number);
    IValue value(number);
    if (varying.dtype) value = number_tensor(number, c10::scalarTypeToTypeMeta(*varying.dtype), true);
    if (varying.element < 0) {
      stack_[varying.argument] = std::move(value);
      return;
    }
    auto list = stack_[varying.argument].toList().copy();
    list.set(varying.element, std::move(value));
    stack_[varying.argument] = std::move(list);
  }

  // It writes in place, because making a tensor takes as long as a small kernel.
  static void write(const at::Tensor& tensor, const c10::Scalar& number) {
    LIVE_OF_TYPE(tensor.scalar_type(), [&] { *tensor.mutable_data_ptr<scalar_t>() = number.to<scalar_t>(); });
  }

  OperatorHandle op_;
  DispatchKeySet keys_;
  bool grad_;  // some kernels ask whether autograd is on
  std::vector<IValue> arguments_;
  std::vector<Varying> varying_;
  std::shared_ptr<StepNumbers> numbers_;
  Stack stack_;
};

// ---- as a function of Python's without arguments: pybind's own calls cost more than some kernels ------

constexpr const char* BOUND = "live.bound_call";

inline PyObject* run_bound(PyObject* capsule, PyObject*) {
  HANDLE_TH_ERRORS
  auto* call = static_cast<BoundCall*>(PyCapsule_GetPointer(capsule, BOUND));
  {
    py::gil_scoped_release let_go;
    call->run();
  }
  return call->result().release().ptr();
  END_HANDLE_TH_ERRORS
}

// A function without arguments over an object of ours, which dies with it.
template <class T>
py::object function_over(PyMethodDef& method, const char* name, std::unique_ptr<T> object) {
  const auto drop = [](PyObject* capsule) {
    delete static_cast<T*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
  };
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(object.release(), name, drop));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

inline py::object bind(
    const Node& node, const py::list& arguments, std::vector<Varying> varying,
    std::shared_ptr<StepNumbers> numbers) {
  static PyMethodDef method{"run", &run_bound, METH_NOARGS, "Run the kernel with the numbers of the step."};
  return function_over(method, BOUND, std::make_unique<BoundCall>(node, arguments, std::move(varying), std::move(numbers)));
}

}  // namespace live
