// A step's Python runs on shadows, below autograd; its kernels run later, by a plan.
//
//   Python      an operation -> autograd -> here: as on the tape?   -> a shadow                matching.h
//                                               another one?        -> recorded, a shadow      recording.h
//   afterwards  a plan of the tape runs its kernels; or, in their order, executing.h
//
// Nothing is assumed. Whatever differs from the tape makes another tape, except for numbers, which the
// kernels are given anew.

#include <torch/library.h>

#include <cfenv>

#include "absent_card.h"
#include "chain.h"
#include "exporting.h"
#include "homes.h"
#include "matching.h"
#include "recording.h"

namespace live {
namespace {

template <class Is>
bool has(at::ArrayRef<IValue> given, Is&& is) {
  bool found = false;
  each_tensor(given, [&](const at::Tensor& tensor) { found |= is(tensor); });
  return found;
}

// Whether a tensor class of Python's takes the operation apart. The parts come here.
bool is_pythons(DispatchKeySet keys, at::ArrayRef<IValue> given) {
  return keys.has(DispatchKey::Python) && has(given, is_wrapper);
}

bool is_meta(at::ArrayRef<IValue> given) {
  bool meta = has(given, [](const at::Tensor& tensor) { return tensor.is_meta(); });
  for (const auto& value : given) meta |= value.isDevice() && value.toDevice().is_meta();
  return meta;
}

// Run an operation that belongs on no tape. False: it does belong on one.
bool run_off_tape(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto given = arguments_of(op, stack);
  if (is_pythons(keys, given) || (traits_of(op).composite && !has(given, std::not_fn(is_strided)))) {
    op.redispatchBoxed(keys_below(keys), stack);  // its parts come here
    return true;
  }
  if (!traits_of(op).unseen && !is_meta(given)) return false;
  run_now(op, keys, stack);
  return true;
}

void run_between_steps(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto given = arguments_of(op, stack);
  if (is_pythons(keys, given)) return op.redispatchBoxed(keys_below(keys), stack);
  if (traits_of(op).looks) return run_now(op, keys, stack);
  if (lacks_bytes(given)) return estimate_off_tape(op, keys, stack);
  if (session().pending_step && session().pending_step->draws && traits_of(op).random) wait_for_step();
  bool awaited = false;
  each_storage(given, [&](StorageImpl* storage) { awaited |= is_awaited(storage); });
  if (awaited) {
    settle();
    each_storage(given, [](StorageImpl* storage) { if (is_barred(storage)) materialize(storage); });
  }
  run_now(op, keys, stack);
}

void dispatch(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto* const here = session_here();
  if (!here) return run_now(op, keys, stack);  // its session is over
  const Serving as_its_own(here);
  auto& now = *here;
  if (now.only_records && now.pass) keep_histories(now.histories, op.schema(), arguments_of(op, stack));
  if (now.mode == Mode::replaying) {
    const char* difference = "after the end of the tape";
    for (auto& child : now.current->children) {
      Match match(*now.pass, *child);
      if (match.holds(op, stack)) {
        return issue(*child, match.met(), op, keys, stack, [&] {
          match.take();
          return child.get();
        });
      }
      difference = match.difference;
    }
    if (run_off_tape(op, keys, stack)) return;
    diverge(difference, op);
  }
  if (now.mode == Mode::recording) {
    if (!run_off_tape(op, keys, stack)) record(op, keys, stack);
    return;
  }
  run_between_steps(op, keys, stack);
}

// ---- a step ---------------------------------------------------------------------------------------

void begin(const std::string& name) {
  auto& now = session();
  TORCH_CHECK(now.mode == Mode::between, "a step begins within another one: end that first");
  auto& tree = now.trees[name];
  if (!tree) tree = std::make_unique<Node>();
  hide_shown(nullptr);
  now.current = tree.get();
  now.pass = new_pass(now.used_passes);
  now.divergence.clear();
  now.mode = tree->children.empty() ? Mode::recording : Mode::replaying;
  if (now.mode == Mode::recording) wait_for_step();
  reuse_blocks(now.mode == Mode::recording);
  now.pass->recorded = now.mode == Mode::recording;
}

// The pass, whose last part has not run yet if all of its operations were on the tape.
std::shared_ptr<Pass> end() {
  auto& now = session();
  auto pass = std::move(now.pass);
  now.pass.reset();
  now.mode = Mode::between;
  reuse_blocks(false);
  for (const auto& [tensor, history] : std::exchange(now.histories, {})) history.put_back();
  return pass;
}

// Note that what was issued has run by a plan.
void mark_run(Pass& pass) {
  for (const int slot : slots_to_write(pass)) session().known.erase(pass.outside[slot].get());
  pass.done = pass.path.size();
}

void run_as_issued(Pass& pass) {
  struct Always {
    ~Always() { clear_pending(); }
  } always;
  WithoutGil let_go;
  execute(pass);
}

void hand_over(Pass& pass, int slot, const at::Tensor& bytes) {
  const auto storage = pass.bound[slot].lock();
  if (storage) give(storage.get(), share(storage_of(bytes)));
}

// Memory that was only allocated, and that somebody holds, is there from now on.
void give_memory(Pass& pass, int slot, const at::Tensor& bytes) {
  hand_over(pass, slot, bytes);
  pass.outside[slot] = pass.bound[slot].lock();
}

// Let this thread work for the session from now on; null: for none.
void serve(Session* session) {
  own = current = session;
  carry(session);
}

std::shared_ptr<Session> open(
    const std::string& device, bool plans_at_once, py::object place, py::object run_part, py::object wait_for_step) {
  TORCH_CHECK(!session_here(), "a live session is open already in this thread");
  auto now = std::make_shared<Session>();
  now->mode = Mode::between;
  now->device = c10::Device(device).type();
  now->plans_at_once = plans_at_once;
  now->place = std::move(place);
  now->run_part = std::move(run_part);
  now->wait_for_step = std::move(wait_for_step);
  serve(now.get());
  sessions().push_back(now.get());
  c10::impl::tls_set_dispatch_key_included(KEY, true);
  return now;
}

void check_here(const Session& now) { TORCH_CHECK(&now == own, "a live session ends in the thread that opened it"); }

void close(Session& now) {
  check_here(now);
  c10::impl::tls_set_dispatch_key_included(KEY, false);
  serve(nullptr);
  sessions().erase(std::find(sessions().begin(), sessions().end(), &now));
  now.mode = Mode::off;
  now.place = now.run_part = now.wait_for_step = py::object();
}

// The next two may come from a thread without a session, too.
void touch_tensor(const at::Tensor& tensor) {
  const Serving as_its_own(session_here());
  if (current && current->only_records) settle();
  if (tensor.defined()) each_storage(tensor, touch);
}

void settle_here() {
  const Serving as_its_own(session_here());
  if (current && !current->estimates) settle();
}

// A capture has to know of every look at a generator, which no run of it repeats.
void settle_draws_here() {
  const Serving as_its_own(session_here());
  if (!current || current->estimates) return;
  const auto& now = session();
  if (now.pending_step && now.pending_step->draws) wait_for_step();
  if (now.only_records || (now.pass && draws_wait(*now.pass))) settle();
}

// How this thread rounds, and what it does with the smallest numbers.
py::bytes rounding() {
  std::fenv_t now;
  std::fegetenv(&now);
  return py::bytes(reinterpret_cast<const char*>(&now), sizeof now);
}

void set_rounding(const py::bytes& given) {
  const std::string bytes = given;
  std::fenv_t now;
  std::memcpy(&now, bytes.data(), sizeof now);
  std::fesetenv(&now);
}

// Somebody gets a pointer to the bytes. `array`: numpy does, and `conceal` is called when its array dies.
std::shared_ptr<Session> expose(const at::Tensor& tensor, bool array) {
  const Serving as_its_own(session_here());
  if (!tensor.defined()) return nullptr;
  if (current && current->only_records) settle();
  each_storage(tensor, [&](StorageImpl* storage) {
    touch(storage);
    check_not_anothers(storage);
    if (!current) return;
    for (auto* adopted : shown()) {
      if (adopted->user._unsafe_get_target() == storage) copy_shown(storage, *adopted);
    }
    auto& exposure = current->exposed.try_emplace(storage, Exposure{weak(storage), storage->resizable()}).first->second;
    exposure.arrays += array;
    exposure.for_good |= !array;
  });
  return current ? current->shared_from_this() : nullptr;
}

void conceal(Session& now, uintptr_t storage) {
  auto& exposed = now.exposed;
  const auto found = exposed.find(reinterpret_cast<StorageImpl*>(storage));
  if (found == exposed.end() || --found->second.arrays > 0 || found->second.for_good) return;
  if (const auto alive = found->second.storage.lock()) alive->set_resizable(found->second.was_resizable);
  exposed.erase(found);
}

void forget_all() {
  auto& now = session();
  shown().clear();
  now.adopted.clear();
  now.exposed.clear();
}

// Adopted storages show their bytes to every thread, until a step begins; those that are on another device
// only as `copies`.
void show_all(bool copies) {
  hide_shown(nullptr);
  for (auto& [storage, adopted] : session().adopted) {
    const auto user = adopted->user.lock();
    const bool there = copies || adopted->home.device() == storage->device();
    if (user && absent_of(storage) && there) show(storage, *adopted);
  }
}

// Every adopted storage has its bytes for good.
void release_all() {
  for (auto& [storage, adopted] : session().adopted) {
    if (const auto user = adopted->user.lock()) materialize(storage);
  }
  forget_all();
}

// No adopted storage has bytes any more: they are on a device that is lost.
void abandon_all() {
  for (auto& [storage, adopted] : session().adopted) {
    const auto user = adopted->user.lock();
    if (user && absent_of(storage)) drop_bytes(storage);
  }
  forget_all();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

PYBIND11_MODULE(live, module) {
  py::class_<Session, std::shared_ptr<Session>>(module, "Session")
      .def("serve", &serve)
      .def_readwrite("may_draw", &Session::may_draw)
      .def_readonly("draws", &Session::draws)
      .def("check_here", &check_here)
      .def("close", &close)
      .def("conceal", &conceal);
  py::class_<Value>(module, "Value")
      .def_readonly("slot", &Value::slot)
      .def_readonly("offset", &Value::offset)
      .def_readonly("nbytes", &Value::nbytes)
      .def_property_readonly("dtype", [](const Value& v) { return v.dtype.toScalarType(); })
      .def_property_readonly("size", [](const Value& v) { return py::tuple(py::cast(std::vector<int64_t>(v.sizes.begin(), v.sizes.end()))); })
      .def_property_readonly("stride", [](const Value& v) { return py::tuple(py::cast(std::vector<int64_t>(v.strides.begin(), v.strides.end()))); })
      .def_property_readonly("device", [](const Value& v) { return c10::DeviceTypeName(v.device.type(), true); })
      .def_property_readonly("lazy", [](const Value& v) { return v.keys.has_any(DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative})); })
      .def_property_readonly("is_zero", [](const Value& v) { return v.keys.has(DispatchKey::ZeroTensor); });
  py::class_<Placed>(module, "Placed")
      .def_readonly("id", &Placed::id)
      .def_readonly("tensor", &Placed::tensor)
      .def_readonly("home", &Placed::home);
  py::class_<NumberAt>(module, "Number")
      .def_readonly("index", &NumberAt::index)
      .def_readonly("recorded", &NumberAt::recorded)
      .def_readonly("dtype", &NumberAt::dtype)
      .def_readonly("of_python", &NumberAt::of_python);
  py::class_<StepNumbers, std::shared_ptr<StepNumbers>>(module, "StepNumbers")
      .def(py::init<>())
      .def("take", &StepNumbers::take)
      .def("at", [](const StepNumbers& numbers, size_t index) { return to_python(numbers.at(index)); });
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
      .def("numbers_since", [](const Node& first, const Node& last) {
        std::vector<size_t> numbers;
        for (size_t n = first.first_number; n < last.first_number + last.numbers.size(); n++) numbers.push_back(n);
        return numbers;
      })
      .def_property_readonly("arguments", &arguments_to_python)
      .def_property_readonly("made", &made_by)
      .def_property_readonly("tried", &tried_by)
      .def_property_readonly("written", &slots_written);
  py::class_<Pass, std::shared_ptr<Pass>>(module, "Pass")
      .def_property_readonly("nodes", [](const Pass& p) { return p.path; }, py::return_value_policy::reference)
      .def_property_readonly("leaf", [](const Pass& p) { return p.path.empty() ? 0 : reinterpret_cast<uintptr_t>(p.path.back()); })
      .def_property_readonly("ran", [](const Pass& p) { return py::bytes(p.ran.data(), p.ran.size()); })
      .def_readonly("varied", &Pass::varied)
      .def_property_readonly("origins", &origins)
      .def_property_readonly("kind", &kind_of)
      .def_readonly("begin", &Pass::done)
      .def_readonly("recorded", &Pass::recorded)
      .def_readonly("failed", &Pass::failed)
      .def_property_readonly("by_plan", [](const Pass& p) { return !p.as_issued && !p.failed; })
      .def_property_readonly("waits", &waits)
      .def("hide_shown", [](Pass& p) { hide_shown(&p); })
      .def("given_bytes", &given_bytes)
      .def("copied_bytes", &copied_bytes)
      .def("cross", &cross)
      .def("mark_run", &mark_run)
      .def("finish", &finish)
      .def("adopt_at", &adopt_at)
      .def("can_adopt", &can_adopt)
      .def_property_readonly("has_backward", [](const Pass& p) {
        return std::any_of(p.path.begin(), p.path.end(), [](const Node* node) { return node->backward; });
      })
      .def("is_exposed", [](const Pass& p, int slot) { return is_exposed(p.outside[slot].get()); })
      .def("adopt", [](const Pass& p, int slot) { return adopt_storage(p.outside[slot]); })
      .def_property_readonly("held", &held_slots)
      .def_property_readonly("written", &slots_to_write)
      .def("slots_of", &slots_of_tensors)
      .def("slot_of", [](const Pass& p, const at::Tensor& tensor) -> std::optional<int> {
        const auto known = is_strided(tensor) ? p.slot_of.find(storage_of(tensor)) : p.slot_of.end();
        return known == p.slot_of.end() ? std::nullopt : std::optional(known->second);
      })
      .def("holders", [](const Pass& p, int slot) { return p.outside[slot].use_count(); })
      .def("nbytes", [](const Pass& p, int slot) { return p.bound[slot].lock()->nbytes(); })
      .def("hand_over", &hand_over)
      .def("give_memory", &give_memory)
      .def("run_as_issued", &run_as_issued);
  module.attr("GIVEN") = GIVEN;
  module.def("bind", &bind);
  module.def("chain", &chain);
  module.def("open", &open, py::arg("device"), py::arg("plans_at_once"), py::arg("place"), py::arg("run_part"),
             py::arg("wait_for_step") = py::none());
  module.def("watch_allocations", [](uintptr_t watch, uintptr_t watched) {  // addresses of functions; 0: none
    session().watch = reinterpret_cast<decltype(session().watch)>(watch);
    session().watched = reinterpret_cast<decltype(session().watched)>(watched);
  });
  module.def("reuse_blocks", [](uintptr_t reuse) { session().reuse = reinterpret_cast<decltype(session().reuse)>(reuse); });
  module.def("rounding", &rounding);
  module.def("set_rounding", &set_rounding);
  module.def("submit", &submit);
  module.def("complete", &complete);
  module.def("wait_for_step", &wait_for_step);
  module.def("begin", &begin);
  module.def("end", &end);
  module.def("only_record", [] { session().only_records = true; });
  module.def("only_estimate", [] { session().estimates = true; });
  module.def("refusal", [] { return std::exchange(session().refusal, {}); });
  module.def("accept_absent_card", &accept_absent_card);
  module.def("asks_for_driver", [](bool asks) { torch::utils::set_requires_device_init(c10::DeviceType::CUDA, asks); });
  module.def("without_bytes", &without_bytes);
  module.def("become", &become);
  module.def("know", [](const at::Tensor& shadow, const at::Tensor& bytes) {
    session().known[storage_of(shadow)] = bytes;
    session().known_kept.push_back(share(storage_of(shadow)));
  });
  module.def("nbytes", [](const at::Tensor& tensor) { return storage_of(tensor)->nbytes(); });
  module.def("settle", &settle_here);
  module.def("sets_first_flag", [] {
    auto* here = session_here();
    return !here || !here->pass || !std::exchange(here->pass->sets_flags, true);
  });
  module.def("settle_draws", &settle_draws_here);
  module.def("vacate", &vacate);
  module.def("is_backward", [] { return static_cast<bool>(torch::autograd::get_current_node()); });
  module.def("current", [] { return session().pass; });
  module.def("is_in_step", [] { return session_here() && session_here()->pass; });
  module.def("hide_shown", [] { hide_shown(nullptr); });
  module.def("adopted", &adopted_ids);
  module.def("new_id", [] { return session().next_adopted++; });
  module.def("adopt", [](const at::Tensor& tensor) { return adopt_storage(share(storage_of(tensor))); });
  module.def("clear_pending", &clear_pending);
  module.def("touch", &touch_tensor);
  module.def("expose", &expose);
  module.def("expose_storage", [](const c10::Storage& storage) {
    settle_here();
    expose(as_bytes(share(storage.unsafeGetStorageImpl())), false);
  });
  module.def("identity", [](const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(storage_of(tensor)); });
  module.def("is_lost", [](const at::Tensor& tensor) {
    bool lost = false;
    wait_for_step();
    each_storage(tensor, [&](StorageImpl* storage) { lost |= is_lost(storage); });
    return lost;
  });
  module.def("drop", [](const at::Tensor& tensor) { each_storage(tensor, drop_bytes); });
  module.def("has_budget", [] { auto* here = session_here(); return here && here->plans_at_once; });
  module.def("home_of", &home_of);
  module.def("place", &place);
  module.def("claim", &claim);
  module.def("forget_tapes", [] {
    TORCH_CHECK(!session().pass, "tapes are forgotten within a step");
    session().trees.clear();
  });
  module.def("show_all", &show_all);
  module.def("release_all", &release_all);
  module.def("abandon_all", &abandon_all);
  module.def("number_tensor", [](py::object number, at::ScalarType dtype, bool of_python) {
    const auto type = py::isinstance<py::bool_>(number) ? c10::Scalar(number.cast<bool>())
        : py::isinstance<py::int_>(number)              ? c10::Scalar(number.cast<int64_t>())
        : PyComplex_Check(number.ptr()) ? c10::Scalar(c10::complex<double>(number.cast<std::complex<double>>()))
                                        : c10::Scalar(number.cast<double>());
    return number_tensor(type, c10::scalarTypeToTypeMeta(dtype), of_python);
  });
  module.def("divergence", [] { return session().divergence; });
  module.def("without_key", [](DispatchKeySet keys) { return keys.remove(KEY); });
  module.def("set_key", [](bool on) {
    const bool was = c10::impl::tls_is_dispatch_key_included(KEY);
    c10::impl::tls_set_dispatch_key_included(KEY, on);
    return was;
  });
}

}  // namespace live
