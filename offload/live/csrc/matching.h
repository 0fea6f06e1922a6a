// Compares an operation with the next one of the tape, and defers it: its results are shadows.

#pragma once

#include "evaluating.h"

namespace live {

using Met = c10::SmallVector<std::pair<int, StorageImpl*>, 8>;

class Match {
 public:
  Match(Pass& pass, const Node& node) : pass_(pass), node_(node) {}

  // Whether the call is the node's. `difference` says why not.
  bool holds(const OperatorHandle& op, const Stack* stack) {
    if (node_.schema != &op.schema()) return differs("operator");
    const auto& dispatch = c10::impl::raw_local_dispatch_key_set;
    if (dispatch.included_ != node_.dispatch.included_ || dispatch.excluded_ != node_.dispatch.excluded_) {
      return differs("dispatch keys");
    }
    if (c10::AutogradState::get_tls_state().get_grad_mode() != node_.grad) return differs("grad mode");
    if (c10::get_default_dtype() != node_.default_dtype) return differs("default dtype");
    const Argument* next = node_.arguments.data();
    for (const auto& value : arguments_of(op, stack)) {
      if (!matches(next, value)) return false;
    }
    return true;
  }

  // The node becomes the next of the pass.
  void take() {
    for (const auto& [slot, storage] : met_) check_own(storage);
    for (size_t slot = pass_.bound.size(); slot < static_cast<size_t>(node_.slots); slot++) {
      pass_.bound.emplace_back(WeakStorage(Storage()));
      pass_.outside.emplace_back();
    }
    for (const auto& [slot, storage] : met_) {
      pass_.bound[slot] = weak(storage);
      pass_.outside[slot] = share(storage);
      pass_.slot_of.emplace(storage, slot);
    }
    for (size_t n = 0; n < numbers_.size(); n++) {
      if (!same_number(numbers_[n], node_.numbers[n])) pass_.varied.push_back(static_cast<int>(pass_.numbers.size()));
      pass_.numbers.push_back(numbers_[n]);
    }
  }

  const Met& met() const { return met_; }
  const char* difference = "";

 private:
  bool differs(const char* what) {
    difference = what;
    return false;
  }

  bool same_tensor(const Value& value, const at::Tensor& tensor) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (!tensor.defined() || !impl->has_storage() || !value.fits(impl)) return differs("geometry");
    auto* storage = storage_of(tensor);
    if (storage->nbytes() != value.nbytes) return differs("size of a storage");
    if (static_cast<size_t>(value.slot) < pass_.bound.size()) {
      return pass_.bound[value.slot]._unsafe_get_target() == storage || differs("another tensor");
    }
    for (const auto& [slot, met] : met_) {
      if (slot == value.slot) return met == storage || differs("another tensor");
      if (met == storage) return differs("another alias");
    }
    if (pass_.slot_of.count(storage)) return differs("another alias");
    met_.emplace_back(value.slot, storage);
    return true;
  }

  bool matches(const Argument*& next, const IValue& value) {
    const Argument& known = *next++;
    switch (known.kind) {
      case Arg::tensor: return value.isTensor() && same_tensor(*known.value, value.toTensor());
      case Arg::undefined: return (value.isTensor() && !value.toTensor().defined()) || differs("a tensor");
      case Arg::opaque:
        return (value.isTensor() && value.toTensor().defined() && !is_strided(value.toTensor())) || differs("layout");
      case Arg::number:
        if (!value.isTensor() || !value.toTensor().defined() || !is_number(value.toTensor()) ||
            value.toTensor().dtype() != known.value->dtype ||
            value.toTensor().unsafeGetTensorImpl()->is_wrapped_number() != known.value->is_number) {
          return differs("a number");
        }
        numbers_.push_back(number_in(value.toTensor()));
        return true;
      case Arg::none: return value.isNone() || differs("None");
      case Arg::boolean: return (value.isBool() && value.toBool() == (known.integer != 0)) || differs("flag");
      case Arg::integer: return (value.isInt() && value.toInt() == known.integer) || differs("integer");
      case Arg::count:
        if (!value.isInt()) return differs("type of a number");
        numbers_.push_back(value.toScalar());
        return true;
      case Arg::real:
        if (known.integer ? !value.isComplexDouble() : !value.isDouble()) return differs("type of a number");
        numbers_.push_back(value.toScalar());
        return true;
      case Arg::reals: return matches_reals(known, value);
      case Arg::integers: return matches_integers(known, value);
      case Arg::constant: return matches_constant(node_.constants[known.constant], value) || differs("constant");
      default: return matches_list(known, next, value);
    }
  }

  bool matches_list(const Argument& head, const Argument*& next, const IValue& value) {
    if (!value.isList()) return differs("list");
    const auto elements = value.toListRef();
    if (static_cast<int>(elements.size()) != head.count) return differs("length of a list");
    for (const auto& element : elements) {
      if (!matches(next, element)) return false;
    }
    return true;
  }

  bool matches_reals(const Argument& known, const IValue& value) {
    if (!value.isList() || static_cast<int>(value.toListRef().size()) != known.count) return differs("list");
    for (const auto& element : value.toListRef()) {
      if (!element.isDouble()) return differs("type of a number");
      numbers_.push_back(element.toScalar());
    }
    return true;
  }

  bool matches_integers(const Argument& known, const IValue& value) {
    if (!value.isList()) return differs("list");
    const auto elements = value.toListRef();
    const auto& integers = node_.integers[known.count];
    if (elements.size() != integers.size()) return differs("length of a list");
    for (size_t n = 0; n < elements.size(); n++) {
      const int64_t now = elements[n].isBool() ? elements[n].toBool() : elements[n].toInt();
      if (now != integers[n]) return differs("sizes");
    }
    return true;
  }

  bool matches_constant(const IValue& known, const IValue& value) const {
    if (value.tagKind() != known.tagKind()) return false;
    if (value.isGenerator()) return value.toGenerator() == known.toGenerator();
    if (value.isStorage() || value.isObject() || value.isPyObject()) return true;  // runs at once, with these
    return value == known;
  }

  Pass& pass_;
  const Node& node_;
  Met met_;  // storages that the step has not used before
  c10::SmallVector<c10::Scalar, 8> numbers_;
};

// ---- the results ----------------------------------------------------------------------------------

inline at::Tensor flat_argument(const Node& node, at::ArrayRef<IValue> given, int flat) {
  int next = 0;
  for (const auto& value : given) {
    if (node.arguments[next].kind == Arg::tensors) {
      const int count = node.arguments[next].count;
      if (flat > next && flat <= next + count) return value.toListRef()[flat - next - 1].toTensor();
      next += 1 + count;
    } else {
      if (flat == next) return value.toTensor();
      next++;
    }
  }
  TORCH_CHECK(false, "live: argument ", flat, " of ", node.schema->name(), " is missing");
}

inline at::Tensor shadow_of(Pass& pass, const Node& node, const Output& output, at::ArrayRef<IValue> given) {
  if (output.kind == Out::self) return flat_argument(node, given, output.argument);
  if (output.kind == Out::alias) return tensor_of(*output.value, pass.bound[output.value->slot].lock());
  if (output.kind != Out::fresh) return at::Tensor();
  auto storage = make_shadow(output.value->nbytes, output.value->device);
  pass.bound[output.value->slot] = WeakStorage(storage);
  pass.slot_of[storage.get()] = output.value->slot;
  return tensor_of(*output.value, std::move(storage));
}

inline void push_shadows(Pass& pass, const Node& node, Stack* stack, at::ArrayRef<IValue> given) {
  if (node.returns == 1 && node.outputs.size() == 1 && node.outputs[0].kind != Out::other) {  // nearly all
    auto result = shadow_of(pass, node, node.outputs[0], given);
    torch::jit::drop(*stack, given.size());
    stack->emplace_back(std::move(result));
    return;
  }
  std::vector<IValue> results;
  for (size_t n = 0; n < node.outputs.size();) {
    const auto& output = node.outputs[n++];
    if (output.kind == Out::list) {
      c10::List<at::Tensor> list;
      for (int k = 0; k < output.count; k++) list.push_back(shadow_of(pass, node, node.outputs[n++], given));
      results.emplace_back(std::move(list));
    } else if (output.kind == Out::integer) {
      results.emplace_back(static_cast<int64_t>(output.count));
    } else if (output.kind == Out::other) {
      results.emplace_back();
    } else {
      results.emplace_back(shadow_of(pass, node, output, given));
    }
  }
  torch::jit::drop(*stack, given.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

// What an operation made on the user's side, at once, is given to the later ones from outside.
inline void bind_result(Pass& pass, const Output& output, const at::Tensor& made) {
  if (output.kind != Out::fresh || !made.defined() || !is_strided(made)) return;
  const int slot = output.value->slot;
  pass.bound[slot] = weak(storage_of(made));
  pass.outside[slot] = share(storage_of(made));
  pass.slot_of[storage_of(made)] = slot;
}

inline void bind_results(Pass& pass, const Node& node, const Stack& stack) {
  size_t result = stack.size() - node.returns;
  for (size_t n = 0; n < node.outputs.size(); result++) {
    const auto& output = node.outputs[n++];
    if (output.kind == Out::list) {
      const auto made = stack[result].toTensorVector();
      for (int k = 0; k < output.count; k++, n++) {
        if (static_cast<size_t>(k) < made.size()) bind_result(pass, node.outputs[n], made[k]);
      }
    } else if (stack[result].isTensor()) {
      bind_result(pass, output, stack[result].toTensor());
    }
  }
}

// ---- replaying ------------------------------------------------------------------------------------

// Whether an operation of an estimate is given, or makes, what has no bytes: then nothing can run.
inline bool lacks_bytes(at::ArrayRef<IValue> given) {
  const auto& now = session();
  if (!now.estimates) return false;
  const auto is_absent = [&](c10::Device device) { return now.device != c10::kCPU && device.type() == now.device; };
  bool lacks = false;
  each_tensor(given, [&](const at::Tensor& one) { lacks |= is_absent(one.device()); });
  each_storage(given, [&](StorageImpl* storage) { lacks |= absent_of(storage) != nullptr; });
  for (const auto& value : given) lacks |= value.isDevice() && is_absent(value.toDevice());
  return lacks;
}

inline void run_on_the_users_side(const Node& node, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto& pass = *session().pass;
  if (lacks_bytes(arguments_of(op, stack))) push_shadows(pass, node, stack, arguments_of(op, stack));
  else run_now(op, keys, stack);
  bind_results(pass, node, *stack);
}

// An operation that ran at once may have given a storage other bytes: later kernels use those.
inline void forget_moved_bytes(Pass& pass, const Node& node) {
  for (const auto& argument : node.arguments) {
    if (argument.kind != Arg::tensor) continue;
    const auto slot = static_cast<size_t>(argument.value->slot);
    const auto user = pass.bound[slot].lock();
    if (!user || absent_of(user.get()) || pass.real.size() <= slot || !pass.real[slot]) continue;
    if (address_of(pass.real[slot].get()) == address_of(user.get())) continue;
    pass.copies.erase(argument.value->slot);
    for (auto& tensor : pass.tensors) {
      if (tensor.defined() && storage_of(tensor) == pass.real[slot].get()) tensor.reset();
    }
    pass.real[slot].reset();
    pass.outside[slot] = user;
  }
}

// The storage of a slot, which may be one that this call has met first.
inline StorageImpl* storage_at(const Pass& pass, const Met& met, int slot) {
  for (const auto& [number, storage] : met) {
    if (number == slot) return storage;
  }
  const bool known = static_cast<size_t>(slot) < pass.bound.size();
  return known ? pass.bound[slot]._unsafe_get_target() : nullptr;
}

// Whether memory that Python can reach by address forbids to defer a kernel: one that writes it, and one
// that reads it after it was changed. A kernel that reads it gets a copy of what is there now.
inline bool is_held_up(Pass& pass, const Node& node, const Met& met) {
  if (node.kind != Kind::deferred || session().only_records) return false;
  for (const auto& argument : node.arguments) {
    if (argument.kind != Arg::tensor) continue;
    const int slot = argument.value->slot;
    auto* storage = storage_at(pass, met, slot);
    if (!storage || !is_exposed(storage)) continue;
    if (argument.written || !storage->device().is_cpu() || is_barred(storage)) return true;
    auto& copy = pass.copies[slot];
    if (!copy) {
      copy = storage_over(c10::GetCPUAllocator()->allocate(storage->nbytes()), storage->nbytes());
      std::memcpy(address_of(copy.get()), address_of(storage), storage->nbytes());
    } else if (std::memcmp(address_of(copy.get()), address_of(storage), storage->nbytes()) != 0) {
      return true;
    }
  }
  return false;
}

// Nobody reads what a deferred kernel writes, nor writes a single number that it reads.
inline void await_its_turn(Pass& pass, const Node& node) {
  auto& now = session();
  for (const auto& argument : node.arguments) {
    if (argument.kind != Arg::tensor) continue;
    if (argument.written) await_write(pass, argument.value->slot);
    const auto& outside = pass.outside[argument.value->slot];
    if (!outside || !is_tiny(argument.value->dtype, argument.value->nbytes, argument.value->device)) continue;
    if (now.numbers_read.insert(outside.get()).second) now.numbers_read_kept.emplace_back(outside);
  }
}

// Whether an operation that runs at once would meet kernels of the step before.
inline bool meets_pending_step(const Pass& pass, const Node& node, at::ArrayRef<IValue> given) {
  const auto& pending_step = session().pending_step;
  if (!pending_step || !node.on_host) return false;
  bool meets = node.random && pending_step->draws;
  each_storage(given, [&](StorageImpl* storage) {
    const auto slot = pass.slot_of.find(storage);
    const bool is_made_here = slot != pass.slot_of.end() && !pass.outside[slot->second];
    meets |= pending_step->pending.count(storage) || (absent_of(storage) && !is_made_here);
  });
  return meets;
}

// The node becomes the next of the pass, by `take`, and is deferred if it can be.
template <class Take>
void issue(const Node& node, const Met& met, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, Take&& take) {
  auto& now = session();
  auto& pass = *now.pass;
  const auto given = arguments_of(op, stack);
  if (node.random) note_draw(*node.schema, given);
  if (meets_pending_step(pass, node, given)) wait_for_step();
  bool at_once = node.on_host;
  const bool on_absent_card = now.estimates && now.device != c10::kCPU;
  if (at_once && !on_absent_card) each_storage(given, [&](StorageImpl* storage) { at_once &= !is_awaited(storage); });
  if (now.estimates && !at_once && node.kind == Kind::synchronous && run_evaluated(node, op, stack)) {
    now.current = take();
    pass.path.push_back(now.current);
    pass.ran.push_back(1);
    return;
  }
  const bool held_up = !at_once && is_held_up(pass, node, met);
  const bool waits_for_all = !at_once && (node.kind == Kind::synchronous || held_up);
  if (waits_for_all) settle();
  now.current = take();
  pass.path.push_back(now.current);
  pass.ran.push_back(at_once || waits_for_all || node.kind == Kind::reshape);
  if (at_once) {
    run_on_the_users_side(node, op, keys, stack);
  } else if (waits_for_all) {
    each_storage(given, [](StorageImpl* storage) { if (is_barred(storage)) materialize(storage); });
    run_on_the_users_side(node, op, keys, stack);
    forget_moved_bytes(pass, node);
  } else if (node.kind == Kind::reshape) {
    run_now(op, keys, stack);
  } else {
    if (node.kind == Kind::deferred) await_its_turn(pass, node);
    push_shadows(pass, node, stack, given);
  }
}

// The step does something else than the tape: the rest is recorded.
inline void diverge(const char* difference, const OperatorHandle& op) {
  auto& now = session();
  wait_for_step();  // what is recorded is tried at once
  now.divergence = full_name(op.schema()) + " (" + difference + ")";
  if (!now.current->children.empty()) now.divergence += " instead of " + full_name(*now.current->children[0]->schema);
  auto& pass = *now.pass;
  pass.values_of.assign(pass.bound.size(), {});
  pass.on_host.assign(pass.bound.size(), 0);
  for (const Node* node : pass.path) {
    for (const auto& value : node->values) pass.values_of[value->slot].push_back(value.get());
    pass.recorded_by[node->schema].push_back(node);
  }
  for (size_t slot = 0; slot < pass.bound.size(); slot++) {
    const auto& outside = pass.outside[slot];
    if (!outside || pass.values_of[slot].empty()) continue;
    pass.on_host[slot] = is_tiny(pass.values_of[slot].front()->dtype, outside->nbytes(), outside->device());
  }
  pass.recorded = true;
  now.mode = Mode::recording;
  reuse_blocks(true);
}

}  // namespace live
