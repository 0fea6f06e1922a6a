// What an op's schema says of it: once an op, as types are told as texts.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace fake_ops {

// It draws, and takes no generator.
constexpr const char* NATIVE_DROPOUT = "aten::native_dropout";

struct Facts {
  std::string name;
  size_t arguments;
  // By result: which argument it is, or NEW.
  std::vector<int> argument_of;
  bool makes_results = false;
  // Arguments that are given a result, and may be resized for it.
  std::vector<size_t> outs;
  std::vector<size_t> written;
  std::vector<size_t> generators;
  bool random = false;
  // A result is no tensor, or its shape depends on values: the host waits for it.
  bool host_waits = false;
  // A boolean tensor in a list is a mask, whose values give a shape.
  bool indexes = false;

  static constexpr int NEW = -1;
};

inline bool tells(const c10::Argument& argument, const char* type) {
  return argument.type()->str().find(type) != std::string::npos;
}

inline Facts read_facts(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  Facts facts;
  facts.name = schema.name();
  facts.arguments = arguments.size();
  facts.random = facts.name == NATIVE_DROPOUT;
  facts.indexes = facts.name.find("index") != std::string::npos;
  facts.host_waits =
      op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias && alias->isWrite()) facts.written.push_back(i);
    if (arguments[i].is_out()) facts.outs.push_back(i);
    if (tells(arguments[i], "Generator")) facts.generators.push_back(i);
  }
  facts.random |= !facts.generators.empty();
  for (const auto& result : schema.returns()) {
    int from = Facts::NEW;
    for (size_t i = 0; result.alias_info() && i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) from = i;
    }
    facts.argument_of.push_back(from);
    if (from == Facts::NEW) facts.makes_results = true;
    if (!tells(result, "Tensor")) facts.host_waits = true;
  }
  return facts;
}

inline const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex lock;
  static auto* known = new std::unordered_map<c10::OperatorName, Facts>;
  std::lock_guard<std::mutex> held(lock);
  auto place = known->find(op.operator_name());
  if (place == known->end()) place = known->emplace(op.operator_name(), read_facts(op)).first;
  return place->second;  // places in this map never move
}

}  // namespace fake_ops
