// A step's Python runs on shadows, below autograd; its kernels run later, by a plan.
//
//   Python      an operation -> autograd -> here: as on the tape?   -> a shadow       matching.h
//                                               another one?        -> runs, recorded  recording.h
//   afterwards  a plan of the tape runs its kernels; or, in their order, executing.h
//
// Nothing is assumed: whatever differs from the tape is another tape, a number excepted, which the
// kernel is given anew.

#include <torch/library.h>

#include "binding.h"
#include "matching.h"
#include "recording.h"

namespace live {
namespace {

bool has_opaque(at::ArrayRef<IValue> given) {
  bool found = false;
  each_tensor(given, [&](const at::Tensor& tensor) { found |= !is_strided(tensor); });
  return found;
}

bool is_meta(at::ArrayRef<IValue> given) {
  bool meta = false;
  for (const auto& value : given) meta |= value.isDevice() && value.toDevice().is_meta();
  each_tensor(given, [&](const at::Tensor& tensor) { meta |= tensor.is_meta(); });
  return meta;
}

// Operations that are on no tape. True: it has run.
bool passes_by(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto given = arguments_of(op, stack);
  if (known(op).composite && !has_opaque(given)) {
    op.redispatchBoxed(below(keys), stack);  // its parts come here
    return true;
  }
  if (!known(op).unseen && !is_meta(given)) return false;
  run_now(op, keys, stack);
  return true;
}

void between_steps(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto given = arguments_of(op, stack);
  bool awaited = false;
  each_storage(given, [&](StorageImpl* storage) { awaited |= is_awaited(storage); });
  if (awaited) {
    settle();
    each_storage(given, [](StorageImpl* storage) { if (is_barred(storage)) materialize(storage); });
  }
  run_now(op, keys, stack);
}

void dispatch(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto& now = session();
  if (now.mode == Mode::replaying) {
    const char* difference = "after the end of the tape";
    for (auto& child : now.current->children) {
      Match match(*now.pass, *child);
      if (match.holds(op, stack)) return replay(match, *child, op, keys, stack);
      difference = match.difference;
    }
    if (passes_by(op, keys, stack)) return;
    diverge(difference, op);
  }
  if (now.mode == Mode::recording) {
    if (!passes_by(op, keys, stack)) record(op, keys, stack);
    return;
  }
  between_steps(op, keys, stack);
}

// ---- a step ---------------------------------------------------------------------------------------

void begin(const std::string& name) {
  auto& now = session();
  TORCH_CHECK(now.mode == Mode::between, "a step begins within another one: end that first");
  auto& tree = now.trees[name];
  if (!tree) tree = std::make_unique<Node>();
  for (auto* adopted : shown()) {
    const auto user = adopted->user.lock();
    if (user && !absent_of(user.get())) hide(user.get(), *adopted);
  }
  shown().clear();
  now.current = tree.get();
  now.pass = new_pass();
  now.divergence.clear();
  now.waited_for.clear();
  now.mode = tree->children.empty() ? Mode::recording : Mode::replaying;
}

// The pass, if all of its operations were on the tape and none has run. Otherwise it has run.
std::shared_ptr<Pass> end() {
  auto& now = session();
  auto pass = std::move(now.pass);
  now.pass.reset();
  const bool replayed = now.mode == Mode::replaying;
  now.mode = Mode::between;
  if (!replayed || pass->path.empty()) return nullptr;
  if (pass->done == 0 && !pass->failed) return pass;
  struct Always {
    ~Always() { nothing_pending(); }
  } always;
  WithoutGil let_go;
  execute(*pass);
  return nullptr;
}

void run_as_issued(Pass& pass) {
  struct Always {
    ~Always() { nothing_pending(); }
  } always;
  WithoutGil let_go;
  execute(pass);
}

// ---- what Python sees -----------------------------------------------------------------------------

struct NumberAt {  // a number among the arguments of a call
  size_t index;
  py::object recorded;
  std::optional<at::ScalarType> dtype;  // of the tensor that torch made of it
};

py::object argument_to_python(const Node& node, const Argument*& next, size_t& number) {
  const auto& argument = *next++;
  switch (argument.kind) {
    case Arg::tensor: return py::cast(argument.value, py::return_value_policy::reference);
    case Arg::undefined:
    case Arg::none: return py::none();
    case Arg::boolean: return py::bool_(argument.integer != 0);
    case Arg::integer: return py::int_(argument.integer);
    case Arg::count:
    case Arg::real:
    case Arg::number: {
      NumberAt at{number, to_python(node.numbers[number - node.first_number]), std::nullopt};
      if (argument.kind == Arg::number) at.dtype = argument.value->dtype.toScalarType();
      number++;
      return py::cast(std::move(at));
    }
    case Arg::reals: {
      py::list list;
      for (int n = 0; n < argument.count; n++, number++) {
        list.append(NumberAt{number, to_python(node.numbers[number - node.first_number]), std::nullopt});
      }
      return list;
    }
    case Arg::tensors: {
      py::list list;
      for (int n = 0; n < argument.count; n++) list.append(argument_to_python(node, next, number));
      return list;
    }
    case Arg::integers:
    case Arg::constant: return to_python(node.constants[argument.constant]);
    default: TORCH_CHECK(false, "live: an opaque tensor has no place in a plan");
  }
}

py::list arguments_to_python(const Node& node) {
  py::list list;
  size_t number = node.first_number;
  const Argument* end = node.arguments.data() + node.arguments.size();
  for (const Argument* next = node.arguments.data(); next < end;) {
    list.append(argument_to_python(node, next, number));
  }
  return list;
}

// The values that a call makes in new memory, by the position of its results; None for all others.
py::list made_by(const Node& node) {
  py::list list;
  for (const auto& output : node.outputs) {
    if (output.kind == Out::list) continue;
    if (output.kind == Out::fresh) list.append(py::cast(output.value, py::return_value_policy::reference));
    else list.append(py::none());
  }
  return list;
}

py::list slots_written(const Node& node) {
  py::list list;
  for (const auto& argument : node.arguments) {
    if (argument.written && argument.kind == Arg::tensor) list.append(argument.value->slot);
  }
  return list;
}

// A part of what the step was given from outside.
at::Tensor given_bytes(const Pass& pass, int slot, int64_t start, int64_t nbytes) {
  return as_bytes(given_storage(pass, slot)).narrow(0, start, nbytes);
}

constexpr int GIVEN = -1;  // from outside, and not adopted
constexpr int MADE = -2;   // by the step

// By slot: the number of its adopted storage, or one of the above.
int origin_of(const Storage& storage) {
  if (!storage) return MADE;
  if (const auto* absent = absent_of(storage.get()); absent && absent->adopted) return absent->adopted->id;
  const auto& adopted = session().adopted;
  const auto known = adopted.find(storage.get());
  return known == adopted.end() ? GIVEN : known->second->id;
}

std::vector<int> origins(const Pass& pass) {
  std::vector<int> found;
  found.reserve(pass.outside.size());
  for (const auto& storage : pass.outside) found.push_back(origin_of(storage));
  return found;
}

// What must be the same for a plan to serve another pass of the same tape: which storages it was given,
// and which operations ran at once.
py::bytes kind_of(const Pass& pass) {
  const auto found = origins(pass);
  std::string kind(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(int));
  kind.append(pass.ran.data(), pass.ran.size());
  return kind;
}

// The slots that operations use, or only those that they write: deferred ones, or those that ran at
// once.
std::vector<int> slots_of(const Pass& pass, bool deferred, bool written) {
  std::set<int> slots;
  for (size_t n = 0; n < pass.path.size(); n++) {
    const auto& node = *pass.path[n];
    if (deferred ? pass.ran[n] || node.kind != Kind::deferred : !pass.ran[n]) continue;
    for (const auto& argument : node.arguments) {
      if (argument.kind == Arg::tensor && (argument.written || !written)) slots.insert(argument.value->slot);
    }
  }
  return {slots.begin(), slots.end()};
}

// Slots of the step's own that somebody still holds.
std::vector<int> held_slots(const Pass& pass) {
  std::vector<int> held;
  for (size_t slot = 0; slot < pass.bound.size(); slot++) {
    if (!pass.outside[slot] && !pass.bound[slot].expired()) held.push_back(static_cast<int>(slot));
  }
  return held;
}

int slot_of_tensor(const Pass& pass, const at::Tensor& tensor) {
  auto* storage = storage_of(tensor);
  for (size_t slot = 0; slot < pass.bound.size(); slot++) {
    if (pass.bound[slot]._unsafe_get_target() == storage) return static_cast<int>(slot);
  }
  return -1;
}

void hand_over(Pass& pass, int slot, const at::Tensor& bytes) {
  const auto storage = pass.bound[slot].lock();
  if (storage) give(storage.get(), share(storage_of(bytes)));
}

void enable(bool on, py::object place) {
  auto& now = session();
  TORCH_CHECK(on == (now.mode == Mode::off), on ? "a live session is open already" : "no live session is open");
  c10::impl::tls_set_dispatch_key_included(KEY, on);
  now.mode = on ? Mode::between : Mode::off;
  now.place = on ? std::move(place) : py::object();
}

// An adopted storage's number and home.
std::pair<int, at::Tensor> adopt_storage(Storage storage) {
  auto& now = session();
  TORCH_CHECK(!now.adopted.count(storage.get()), "this storage is adopted already");
  if (is_barred(storage.get())) materialize(storage.get());
  auto& adopted = now.adopted[storage.get()] = adopt(storage.get(), now.next_adopted++);
  return {adopted->id, adopted->home};
}

// Every adopted storage has its bytes for good, and every tape is forgotten.
void release_all() {
  auto& now = session();
  for (auto& [storage, adopted] : now.adopted) {
    if (const auto user = adopted->user.lock()) materialize(storage);
  }
  shown().clear();
  now.adopted.clear();
  now.trees.clear();
  now.exposed.clear();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

PYBIND11_MODULE(live, module) {
  py::class_<Value>(module, "Value")
      .def_readonly("slot", &Value::slot)
      .def_readonly("offset", &Value::offset)
      .def_readonly("nbytes", &Value::nbytes)
      .def_property_readonly("dtype", [](const Value& v) { return v.dtype.toScalarType(); })
      .def_property_readonly("size", [](const Value& v) { return py::tuple(py::cast(std::vector<int64_t>(v.sizes.begin(), v.sizes.end()))); })
      .def_property_readonly("stride", [](const Value& v) { return py::tuple(py::cast(std::vector<int64_t>(v.strides.begin(), v.strides.end()))); })
      .def_property_readonly("device", [](const Value& v) { return c10::DeviceTypeName(v.device.type(), true); })
      .def_property_readonly("lazy", [](const Value& v) { return v.keys.has_any(DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor})); });
  py::class_<NumberAt>(module, "Number")
      .def_readonly("index", &NumberAt::index)
      .def_readonly("recorded", &NumberAt::recorded)
      .def_readonly("dtype", &NumberAt::dtype);
  py::class_<StepNumbers, std::shared_ptr<StepNumbers>>(module, "StepNumbers")
      .def(py::init<>())
      .def("take", &StepNumbers::take);
  py::class_<Varying>(module, "Varying")
      .def(py::init<size_t, int, size_t, std::optional<at::ScalarType>>())
      .def_readonly("argument", &Varying::argument)
      .def_readonly("element", &Varying::element)
      .def_readonly("index", &Varying::index)
      .def_readonly("dtype", &Varying::dtype);
  py::class_<Node>(module, "Node")
      .def_property_readonly("op", [](const Node& n) { return full_name(*n.schema); })
      .def_property_readonly("deferred", [](const Node& n) { return n.kind == Kind::deferred; })
      .def_readonly("random", &Node::random)
      .def_readonly("backward", &Node::backward)
      .def_readonly("grad", &Node::grad)
      .def_readonly("where", &Node::where)
      .def_property_readonly("arguments", &arguments_to_python)
      .def_property_readonly("made", &made_by)
      .def_property_readonly("written", &slots_written);
  py::class_<Pass, std::shared_ptr<Pass>>(module, "Pass")
      .def_property_readonly("nodes", [](const Pass& p) { return p.path; }, py::return_value_policy::reference)
      .def_property_readonly("leaf", [](const Pass& p) { return reinterpret_cast<uintptr_t>(p.path.back()); })
      .def_property_readonly("ran", [](const Pass& p) { return py::bytes(p.ran.data(), p.ran.size()); })
      .def_readonly("varied", &Pass::varied)
      .def_property_readonly("origins", &origins)
      .def_property_readonly("kind", &kind_of)
      .def("given_bytes", &given_bytes)
      .def("identity", [](const Pass& p, int slot) { return reinterpret_cast<uintptr_t>(p.outside[slot].get()); })
      .def("adopt", [](const Pass& p, int slot) { return adopt_storage(p.outside[slot]); })
      .def_property_readonly("held", &held_slots)
      .def_property_readonly("used", [](const Pass& p) { return slots_of(p, true, false); })
      .def_property_readonly("written", [](const Pass& p) { return slots_of(p, true, true); })
      .def_property_readonly("used_at_once", [](const Pass& p) { return slots_of(p, false, false); })
      .def("slot_of", &slot_of_tensor)
      .def("hand_over", &hand_over)
      .def("run_as_issued", &run_as_issued);
  module.attr("GIVEN") = GIVEN;
  module.def("bind", &bind);
  module.def("enable", &enable);
  module.def("begin", &begin);
  module.def("end", &end);
  module.def("settle", [](const std::string& why) { settle(why.c_str()); });
  module.def("nothing_pending", &nothing_pending);
  module.def("touch", [](const at::Tensor& tensor) {
    if (session().mode != Mode::off && tensor.defined()) each_storage(tensor, touch);
  });
  module.def("expose", [](const at::Tensor& tensor) {
    if (session().mode == Mode::off || !tensor.defined()) return;
    each_storage(tensor, [](StorageImpl* storage) {
      touch(storage);
      session().exposed.insert_or_assign(storage, weak(storage));
    });
  });
  module.def("identity", [](const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(storage_of(tensor)); });
  module.def("release_all", &release_all);
  module.def("number_tensor", [](py::object number, at::ScalarType dtype) {
    const auto type = py::isinstance<py::bool_>(number) ? c10::Scalar(number.cast<bool>())
        : py::isinstance<py::int_>(number)              ? c10::Scalar(number.cast<int64_t>())
        : PyComplex_Check(number.ptr()) ? c10::Scalar(c10::complex<double>(number.cast<std::complex<double>>()))
                                        : c10::Scalar(number.cast<double>());
    return number_tensor(type, c10::scalarTypeToTypeMeta(dtype));
  });
  module.def("divergence", [] { return session().divergence; });
  module.def("waited_for", [] { return session().waited_for; });
  module.def("without_key", [](DispatchKeySet keys) { return keys.remove(KEY); });
  module.def("set_key", [](bool on) {
    const bool was = c10::impl::tls_is_dispatch_key_included(KEY);
    c10::impl::tls_set_dispatch_key_included(KEY, on);
    return was;
  });
}

}  // namespace live
