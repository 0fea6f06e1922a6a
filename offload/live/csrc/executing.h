// Runs the deferred operations of a pass in their order, on real tensors: without autograd, without
// Python, without a plan. It serves a step that needs a value in its middle, and one without a plan.

#pragma once

#include <c10/core/AutogradState.h>

#include "seeds.h"

namespace live {

// Every thread-local choice that a kernel may ask for; it is put back.
class ThreadState {
 public:
  ~ThreadState() {
    c10::impl::_force_tls_local_dispatch_key_set(keys_);
    c10::AutogradState::set_tls_state(autograd_);
  }

  void set(const Node& node) {
    if (!latest_ || latest_->included_ != node.dispatch.included_ || latest_->excluded_ != node.dispatch.excluded_) {
      latest_ = &node.dispatch;
      auto keys = c10::impl::LocalDispatchKeySet(node.dispatch);
      keys.included_ = keys.included_.remove(KEY).remove(DispatchKey::PythonDispatcher);
      c10::impl::_force_tls_local_dispatch_key_set(keys);
    }
    c10::AutogradState::get_tls_state().set_grad_mode(node.grad);
  }

 private:
  c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();
  c10::AutogradState autograd_ = c10::AutogradState::get_tls_state();
  const c10::impl::PODLocalDispatchKeySet* latest_ = nullptr;
};

// What the step was given, as it was then.
inline Storage given_storage(const Pass& pass, int slot) {
  const auto copy = pass.copies.find(slot);
  return copy == pass.copies.end() ? bytes_of(pass.outside[slot]) : copy->second;
}

// The bytes of what was made before a cut. If nobody holds it any more, its home still has them.
inline Storage bytes_of_crossed(const Adopted& crossed, c10::Device device) {
  if (const auto user = crossed.user.lock()) return bytes_of(user);
  WithoutKey off;
  const auto home = crossed.home.to(device);
  auto* storage = storage_of(home);
  return storage_over(borrow(share(storage), address_of(storage), device), storage->nbytes());
}

inline const at::Tensor& real_tensor(Pass& pass, const Value& value) {
  auto& tensor = pass.tensors[value.id];
  if (tensor.defined()) return tensor;
  auto& storage = pass.real[value.slot];
  if (!storage) {
    auto* crossed = crossed_at(pass, value.slot);
    TORCH_CHECK(crossed || pass.outside[value.slot], "live: storage ", value.slot, " was never made");
    storage = crossed ? bytes_of_crossed(*crossed, value.device) : given_storage(pass, value.slot);
  }
  return tensor = tensor_of(value, storage);
}

// The numbers of a node in this pass, one after the other.
struct Numbers {
  const std::vector<c10::Scalar>& all;
  size_t next;
  const c10::Scalar& take() { return all[next++]; }
};

inline IValue real_argument(Pass& pass, const Node& node, const Argument& argument, Numbers& numbers) {
  switch (argument.kind) {
    case Arg::tensor: return real_tensor(pass, *argument.value);
    case Arg::undefined: return at::Tensor();
    case Arg::none: return IValue();
    case Arg::boolean: return argument.integer != 0;
    case Arg::integer: return argument.integer;
    case Arg::count:
    case Arg::real: return numbers.take();
    case Arg::number: return number_tensor(numbers.take(), argument.value->dtype, argument.value->is_number);
    case Arg::integers:
    case Arg::constant: return node.constants[argument.constant];
    case Arg::reals: {
      auto list = node.constants[argument.constant].toList().copy();
      for (int n = 0; n < argument.count; n++) list.set(n, IValue(numbers.take()));
      return list;
    }
    default: TORCH_CHECK(false, "live: ", node.schema->name(), " was deferred with an opaque tensor");
  }
}

inline IValue real_tensors(Pass& pass, const Argument*& next) {
  const auto& head = *next++;
  const bool holes = head.integer != 0;
  c10::List<std::optional<at::Tensor>> some;
  c10::List<at::Tensor> all;
  for (int n = 0; n < head.count; n++, next++) {
    const bool there = next->kind == Arg::tensor;
    if (holes) some.push_back(there ? std::optional(real_tensor(pass, *next->value)) : std::nullopt);
    else all.push_back(there ? real_tensor(pass, *next->value) : at::Tensor());
  }
  return holes ? IValue(std::move(some)) : IValue(std::move(all));
}

// Keep what a kernel has made. Its geometry was recorded from a kernel, so it is only checked.
inline void take_output(Pass& pass, const Node& node, const Output& output, const at::Tensor& made) {
  if (output.kind == Out::alias && !pass.real[output.value->slot]) {
    pass.real[output.value->slot] = share(storage_of(made));
  }
  if (output.kind != Out::fresh) return;
  const auto& value = *output.value;
  TORCH_CHECK(
      made.defined() && made.sizes() == c10::IntArrayRef(value.sizes) &&
          made.strides() == c10::IntArrayRef(value.strides),
      "live: ", node.schema->name(), " returned another geometry than when it was recorded");
  pass.tensors[value.id] = made;
  pass.real[value.slot] = share(storage_of(made));
}

inline void take_outputs(Pass& pass, const Node& node, const Stack& stack) {
  size_t result = stack.size() - node.returns;
  for (size_t n = 0; n < node.outputs.size(); result++) {
    const auto& output = node.outputs[n++];
    if (output.kind == Out::list) {
      const auto made = stack[result].toTensorVector();
      for (const auto& tensor : made) take_output(pass, node, node.outputs[n++], tensor);
    } else if (output.kind == Out::fresh || output.kind == Out::alias) {
      take_output(pass, node, output, stack[result].toTensor());
    }
  }
}

inline void execute_node(Pass& pass, const Node& node, Stack& stack) {
  stack.clear();
  Numbers numbers{pass.numbers, node.first_number};
  const Argument* end = node.arguments.data() + node.arguments.size();
  for (const Argument* next = node.arguments.data(); next < end;) {
    if (next->kind == Arg::tensors) stack.push_back(real_tensors(pass, next));
    else stack.push_back(real_argument(pass, node, *next++, numbers));
  }
  give_seeds(*node.op, stack);
  node.op->redispatchBoxed(node.keys, &stack);
  take_seeds(*node.op, stack);
  take_outputs(pass, node, stack);
}

// Give the shadows that somebody still holds their bytes.
inline void hand_out(Pass& pass) {
  for (size_t slot = 0; slot < pass.bound.size() && slot < pass.real.size(); slot++) {
    if (!pass.real[slot] || pass.outside[slot]) continue;
    const auto storage = pass.bound[slot].lock();
    if (storage) give(storage.get(), pass.real[slot]);
  }
}

inline const LastUses& last_uses(const Pass& pass) {
  Node& leaf = *pass.path.back();
  if (leaf.last_uses) return *leaf.last_uses;
  auto uses = std::make_unique<LastUses>();
  uses->slots.resize(pass.path.size());
  uses->values.resize(pass.path.size());
  std::vector<std::vector<int>> values(leaf.slots);
  for (const Node* node : pass.path) {
    for (const auto& value : node->values) values[value->slot].push_back(value->id);
  }
  std::vector<char> seen(leaf.slots, 0);
  for (size_t n = pass.path.size(); n-- > 0;) {
    const auto use = [&](const Value* value) {
      if (!value || seen[value->slot]) return;
      seen[value->slot] = 1;
      uses->slots[n].push_back(value->slot);
      for (int id : values[value->slot]) uses->values[n].push_back(id);
    };
    for (const auto& argument : pass.path[n]->arguments) use(argument.value);
    for (const auto& output : pass.path[n]->outputs) use(output.value);
  }
  leaf.last_uses = std::move(uses);
  return *leaf.last_uses;
}

// Free what nobody needs after this node. What somebody holds may be used by a later operation.
inline void free_dead(Pass& pass, const LastUses& uses, size_t node) {
  for (int id : uses.values[node]) pass.tensors[id].reset();
  for (int slot : uses.slots[node]) {
    if (!pass.outside[slot] && pass.bound[slot].expired()) pass.real[slot].reset();
  }
}

// Run what was issued so far and has not run. After an error nothing of the pass runs any more.
inline void execute(Pass& pass) {
  if (pass.failed || pass.path.empty()) return;
  pass.as_issued = true;
  const Node& leaf = *pass.path.back();
  pass.real.resize(std::max<size_t>(pass.real.size(), leaf.slots));
  pass.tensors.resize(std::max<size_t>(pass.tensors.size(), leaf.value_count));
  const auto& uses = last_uses(pass);
  ThreadState state;
  Stack stack;
  pass.failed = true;
  for (; pass.done < pass.path.size(); pass.done++) {
    const Node& node = *pass.path[pass.done];
    if (!pass.ran[pass.done] && node.kind == Kind::deferred) {
      state.set(node);
      execute_node(pass, node, stack);
    }
    free_dead(pass, uses, pass.done);
  }
  pass.failed = false;
  hand_out(pass);
}

inline bool waits(const Pass& pass) {
  for (size_t n = pass.done; n < pass.path.size(); n++) {
    if (!pass.ran[n] && pass.path[n]->kind == Kind::deferred) return true;
  }
  return false;
}

// Run what was issued by a plan of its own. False: there is none. Without a budget a cut has none at first:
// it may never come again.
inline bool run_part(Session& now) {
  auto& pass = *now.pass;
  const bool is_new = !std::exchange(now.current->cut, true);
  if (pass.as_issued || pass.failed) return false;
  if (!now.only_records && !waits(pass)) return true;
  if (is_new && !now.plans_at_once) return false;
  pybind11::gil_scoped_acquire python;
  pass.failed = true;
  const bool ran = now.run_part(now.pass).cast<bool>();
  pass.failed = false;
  return ran;
}

// An estimate has no values.
inline void refuse_value() {
  pybind11::gil_scoped_acquire python;
  session().run_part(session().pass);
}

// Everything that was issued has run afterwards, and whatever is looked at can become real.
inline void settle() {
  auto& now = session();
  struct Always {
    ~Always() { clear_pending(); }
  } always;
  wait_for_step();
  if (now.estimates && now.pass) return refuse_value();
  if (!now.pass || run_part(now)) return;
  WithoutGil let_go;
  execute(*now.pass);
}

// Whether a kernel that draws is still to run: until then generators are not what the step's code expects.
inline bool draws_wait(const Pass& pass) {
  for (size_t n = pass.done; n < pass.path.size(); n++) {
    if (!pass.ran[n] && pass.path[n]->op && traits_of(*pass.path[n]->op).random) return true;
  }
  return false;
}

inline void touch(StorageImpl* storage) {
  if (!is_barred(storage)) return;
  check_own(storage);
  if (session().estimates && absent_of(storage)) refuse_value();
  // The bytes of an adopted storage that no deferred kernel writes are at home.
  auto* absent = absent_of(storage);
  if (session().pass || !absent) settle();
  materialize(storage);
}

}  // namespace live
