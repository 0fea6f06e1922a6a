// What Python sees of a tape, to make a graph of it.

#pragma once

#include "binding.h"
#include "executing.h"

namespace live {

struct NumberAt {  // a number among the arguments of a call
  size_t index;
  py::object recorded;
  std::optional<at::ScalarType> dtype;  // of the tensor that has it
  bool of_python = false;               // torch made that tensor
};

inline py::object argument_to_python(const Node& node, const Argument*& next, size_t& number) {
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
      if (argument.kind == Arg::number) {
        at.dtype = argument.value->dtype.toScalarType();
        at.of_python = argument.value->is_number;
      }
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

inline py::list arguments_to_python(const Node& node) {
  py::list list;
  size_t number = node.first_number;
  const Argument* end = node.arguments.data() + node.arguments.size();
  for (const Argument* next = node.arguments.data(); next < end;) {
    list.append(argument_to_python(node, next, number));
  }
  return list;
}

// The values that a call makes in new memory, by the position of its results; None for all others.
inline py::list made_by(const Node& node) {
  py::list list;
  for (const auto& output : node.outputs) {
    if (output.kind == Out::list) continue;
    if (output.kind == Out::fresh) list.append(py::cast(output.value, py::return_value_policy::reference));
    else list.append(py::none());
  }
  return list;
}

// What it allocated on stand-ins: addresses and bytes, those of its results, bytes elsewhere, seconds.
inline py::object tried_by(const Node& node) {
  if (!node.tried) return py::none();
  py::list events;
  for (const auto& event : node.tried->events) events.append(py::make_tuple(reinterpret_cast<uint64_t>(event.address), event.nbytes));
  return py::make_tuple(events, node.tried->homes, node.tried->elsewhere, node.tried->seconds);
}

inline py::list slots_written(const Node& node) {
  py::list list;
  for (const auto& argument : node.arguments) {
    if (argument.written && argument.kind == Arg::tensor) list.append(argument.value->slot);
  }
  return list;
}

// A part of what the step was given from outside.
inline at::Tensor given_bytes(const Pass& pass, int slot, int64_t start, int64_t nbytes) {
  return as_bytes(given_storage(pass, slot)).narrow(0, start, nbytes);
}

// The same in memory of its own, without an operation that a mode of the user's could see.
inline at::Tensor copied_bytes(const Pass& pass, int slot, int64_t start, int64_t nbytes) {
  const auto storage = given_storage(pass, slot);
  auto copy = storage_over(c10::GetCPUAllocator()->allocate(nbytes), nbytes);
  std::memcpy(address_of(copy.get()), static_cast<char*>(address_of(storage.get())) + start, nbytes);
  return as_bytes(std::move(copy));
}

inline constexpr int GIVEN = -1;  // from outside, and not adopted
inline constexpr int MADE = -2;   // by the step

// By slot: the number of its adopted storage, or one of the above.
inline int origin_of(const Storage& storage) {
  if (!storage) return MADE;
  if (const auto* absent = absent_of(storage.get()); absent && absent->adopted && absent->owner == session_here()) {
    return absent->adopted->id;
  }
  const auto& adopted = session().adopted;
  const auto known = adopted.find(storage.get());
  return known == adopted.end() ? GIVEN : known->second->id;
}

inline std::vector<int> origins(const Pass& pass) {
  std::vector<int> found;
  found.reserve(pass.outside.size());
  for (size_t slot = 0; slot < pass.outside.size(); slot++) {
    const auto* crossed = crossed_at(pass, static_cast<int>(slot));
    found.push_back(crossed ? crossed->id : origin_of(pass.outside[slot]));
  }
  return found;
}

// What must be the same for a plan to serve another pass of the same tape: which storages it was given,
// and which operations ran at once.
inline py::bytes kind_of(const Pass& pass) {
  const auto found = origins(pass);
  std::string kind(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(int));
  kind.append(pass.ran.data(), pass.ran.size());
  return kind;
}

// The slots that deferred operations since the last cut write.
inline std::set<int> slots_to_write(const Pass& pass) {
  std::set<int> slots;
  for (size_t n = pass.done; n < pass.path.size(); n++) {
    if (pass.ran[n] || pass.path[n]->kind != Kind::deferred) continue;
    for (const auto& argument : pass.path[n]->arguments) {
      if (argument.kind == Arg::tensor && argument.written) slots.insert(argument.value->slot);
    }
  }
  return slots;
}

// Slots of the step's own that somebody still holds.
inline std::vector<int> held_slots(const Pass& pass) {
  std::vector<int> held;
  for (size_t slot = 0; slot < pass.bound.size(); slot++) {
    if (!pass.outside[slot] && !pass.bound[slot].expired()) held.push_back(static_cast<int>(slot));
  }
  return held;
}

// The slots of tensors, of those that the pass knows.
inline std::set<int> slots_of_tensors(const Pass& pass, const std::vector<at::Tensor>& tensors) {
  std::unordered_set<StorageImpl*> storages;
  for (const auto& tensor : tensors) {
    if (is_strided(tensor)) storages.insert(storage_of(tensor));
  }
  std::set<int> slots;
  for (size_t slot = 0; slot < pass.bound.size(); slot++) {
    if (storages.count(pass.bound[slot]._unsafe_get_target())) slots.insert(static_cast<int>(slot));
  }
  return slots;
}

}  // namespace live
