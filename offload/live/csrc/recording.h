// Puts an operation onto the tape. It is deferred as one that was on it is, unless it cannot wait.

#pragma once

#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#else
#include <torch/csrc/autograd/function.h>
#endif

#include "evaluating.h"
#include "matching.h"
#include "stand_ins.h"
#include "twins.h"

namespace live {

// `torch.tensor` calls it with what it has made of numbers.
inline constexpr const char* LITERAL = "aten::lift_fresh";

class Recording {
 public:
  Recording(Pass& pass, Node* parent, const OperatorHandle& op, DispatchKeySet keys)
      : pass_(pass), known_(traits_of(op)), schema_(op.schema()), own_(std::make_unique<Node>()), node_(own_.get()) {
    node_->op.emplace(op);
    node_->schema = &schema_;
    node_->keys = keys_below(keys).remove(DispatchKey::PythonDispatcher);  // whose state is the compiling thread's
    node_->parent = parent;
    node_->value_count = parent->value_count;
    node_->first_number = pass.numbers.size();
    node_->random = known_.random;
    const auto dispatch = c10::impl::tls_local_dispatch_key_set();
    node_->dispatch.set_included(dispatch.included_);
    node_->dispatch.set_excluded(dispatch.excluded_);
    node_->grad = c10::AutogradState::get_tls_state().get_grad_mode();
    node_->default_dtype = c10::get_default_dtype();
    node_->backward = static_cast<bool>(torch::autograd::get_current_node());
    synchronous_ = known_.synchronous;
    on_host_ = !known_.random;
  }

  // An operation that has raised is on no tape.
  ~Recording() {
    if (!own_) return;
    for (const auto& value : own_->values) {
      auto& known = pass_.values_of[value->slot];
      known.erase(std::remove(known.begin(), known.end(), value.get()), known.end());
    }
  }

  // What the operation makes, found on stand-ins. False: it can only be found by running it.
  bool try_stand_ins(const OperatorHandle& op, DispatchKeySet keys, const Stack* stack) {
    const auto given = arguments_of(op, stack);
    if (known_.random) note_draw(schema_, given);
    each_tensor(given, [&](const at::Tensor& one) { on_device_ |= one.device().type() != c10::kCPU; });
    for (size_t n = 0; n < given.size(); n++) add(given[n], schema_.arguments()[n]);
    slots_given_ = pass_.bound.size();
    if (schema_.name() == "aten::index") check_masks();
    if (synchronous_) return false;
    if (schema_.returns().empty()) {  // it makes nothing
      settle_kind(false);
      return true;
    }
    if (take_from_twin()) return true;
    const bool by_position = schema_.name().rfind("aten::_foreach_", 0) == 0 && given[0].isList();
    const size_t positions = by_position ? given[0].toListRef().size() : 0;
    bool only_views = true;
    if (positions > 1) {
      node_->returns = 1;
      node_->outputs.push_back({Out::list, static_cast<int>(positions)});
    }
    // A list of all weights would take their bytes: each position is computed by itself.
    for (size_t position = 0; position < std::max<size_t>(positions, 1); position++) {
      WithoutKey off;
      const LargeBlocksApart apart;
      StandIns stand_ins;
      auto tried = std::make_shared<Tried>();
      Stack made = put_stand_ins(given, stand_ins, positions > 1 ? std::optional(position) : std::nullopt);
      try {
        const WithoutDraws kept(known_.random && !session().estimates);
        const Watch watch(*tried);
        if (session().estimates) {
          estimate_results(op, given, made);
        } else {
          give_seeds(op, made);
          op.redispatchBoxed(keys_below(keys), &made);
          take_seeds(op, made);
        }
      } catch (const std::exception& error) {
        session().refusal = error.what();
        return false;  // it raises with the real tensors, too, or it asks for their values
      }
      stand_ins_ = &stand_ins;
      new_.clear();
      homes_.clear();
      only_views &= positions > 1 ? add_made(made.at(0).toTensorVector().at(0)) : add_results(made);
      stand_ins_ = nullptr;
      if (synchronous_ || arguments_have_changed()) return false;
      for (auto& one : tensors_) {
        if (one.original.defined()) one.tensor = one.original;
        if (one.storage) one.storage = storage_of(one.original);
      }
      tried->homes = homes_;
      if (positions <= 1 && session().watch) node_->tried = std::move(tried);
    }
    settle_kind(only_views);
    return true;
  }

  // The geometry of the results, which are of the device that the call names, or of its tensors.
  void estimate_results(const OperatorHandle& op, at::ArrayRef<IValue> given, Stack& made) {
    device_ = on_device_ ? c10::Device(session().device, 0) : c10::Device(c10::kCPU);
    const auto named = schema_.argumentIndexWithName("device");
    if (named && schema_.arguments()[*named].type()->str() != "Tensor") {
      auto& device = made[*named];
      if (device.isDevice()) device_ = c10::Device(device.toDevice().type(), device.toDevice().is_cpu() ? -1 : 0);
      const bool makes = std::none_of(given.begin(), given.end(), [](const IValue& one) { return one.isTensor(); });
      if (device.isDevice() || makes) device = c10::Device(c10::kMeta);
    }
    op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &made);
  }

  // The same without running, if an earlier operation of the tape was the same but for its bytes.
  bool take_from_twin() {
    auto& alike = pass_.recorded_by[&schema_];
    const auto twin = std::find_if(alike.rbegin(), alike.rend(), [&](const Node* other) { return are_twins(*node_, *other); });
    if (on_host_ || twin == alike.rend()) return false;
    node_->tried = (*twin)->tried;
    node_->returns = (*twin)->returns;
    node_->outputs = (*twin)->outputs;
    bool only_views = node_->returns > 0;
    for (auto& output : node_->outputs) {
      only_views &= output.kind != Out::fresh;
      if (output.kind == Out::fresh) output.value = make_fresh_like(*output.value);
    }
    settle_kind(only_views);
    return true;
  }

  // The same for an operation that has run at once.
  void take_results(const Stack& stack) {
    forget_results();
    synchronous_ = true;
    settle_kind(add_results(stack));
    for (const auto& output : node_->outputs) {
      if (output.kind == Out::fresh) pass_.outside[output.value->slot] = pass_.bound[output.value->slot].lock();
    }
  }

  std::unique_ptr<Node> take() {
    pass_.numbers.insert(pass_.numbers.end(), node_->numbers.begin(), node_->numbers.end());
    pass_.recorded_by[&schema_].push_back(node_);
    return std::move(own_);
  }

  Node& node() { return *node_; }

  // Whether it is given single numbers of the host only.
  bool is_on_host() const { return on_host_ && !writes_; }

  // Whether it is given nothing but numbers that the step's own code writes down.
  bool is_written_down() const { return written_down_ && !writes_ && !known_.random; }

  // Whether it makes what the host needs at once.
  bool must_run() const { return node_->kind == Kind::synchronous && !node_->on_host; }

  // Whether a tensor of the user's gets another shape, which happens at once.
  bool reshapes_given() const {
    if (node_->kind != Kind::reshape) return false;
    const int slot = node_->arguments[0].value->slot;
    return pass_.outside[slot] && !pass_.on_host[slot];
  }

 private:
  // The arguments on stand-ins; of lists only one position, if one is given.
  Stack put_stand_ins(at::ArrayRef<IValue> given, StandIns& stand_ins, std::optional<size_t> position) {
    const auto each = [&](auto&& visit) {
      size_t next = 0;
      for (const auto& value : given) {
        const auto& argument = node_->arguments[next];
        const size_t count = argument.kind == Arg::tensors ? argument.count : 0;
        for (size_t n = next + (count > 0); n <= next + count; n++) {
          if (tensors_[n].original.defined() && (count == 0 || !position || n - next - 1 == *position)) visit(tensors_[n]);
        }
        next += 1 + (argument.kind == Arg::tensors ? count : 0);
      }
    };
    each([&](Given& one) { stand_ins.see(one.original); });
    each([&](Given& one) { one.tensor = stand_ins.make(one.original); });
    each([&](Given& one) { one.storage = storage_of(one.tensor); });
    Stack stack;
    size_t next = 0;
    for (const auto& value : given) {
      const auto& argument = node_->arguments[next];
      if (argument.kind == Arg::tensors) {
        next++;
        c10::List<std::optional<at::Tensor>> some;
        c10::List<at::Tensor> all;
        for (int n = 0; n < argument.count; n++, next++) {
          if (position && static_cast<size_t>(n) != *position) continue;
          const bool hole = node_->arguments[next].kind == Arg::none;
          if (argument.integer) some.push_back(hole ? std::nullopt : std::optional(tensors_[next].tensor));
          else all.push_back(tensors_[next].tensor);
        }
        stack.push_back(argument.integer ? IValue(std::move(some)) : IValue(std::move(all)));
      } else if (value.isTensor()) {
        stack.emplace_back(tensors_[next++].tensor);
      } else {
        const bool scalars = position && value.isList() && value.toListRef().size() == given[0].toListRef().size();
        stack.push_back(scalars ? one_of(value, *position) : value);
        next++;
      }
    }
    return stack;
  }

  // A list of numbers, at one position.
  static IValue one_of(const IValue& list, size_t position) {
    auto one = list.toList().copy();
    one.clear();
    one.push_back(list.toListRef()[position]);
    return one;
  }

  bool add_results(const Stack& stack) {
    node_->returns = static_cast<int>(schema_.returns().size());
    bool only_views = node_->returns > 0;
    for (int n = 0; n < node_->returns; n++) only_views &= add_result(stack[stack.size() - node_->returns + n]);
    return only_views;
  }

  // The slots of results that were none after all.
  void forget_results() {
    node_->outputs.clear();
    const auto is_result = [&](const auto& value) { return static_cast<size_t>(value->slot) >= slots_given_; };
    node_->values.erase(std::remove_if(node_->values.begin(), node_->values.end(), is_result), node_->values.end());
    pass_.bound.resize(slots_given_, WeakStorage(Storage()));
    pass_.outside.resize(slots_given_);
    pass_.values_of.resize(slots_given_);
    pass_.on_host.resize(slots_given_);
  }

  void settle_kind(bool only_views) {
    synchronous_ |= !on_host_ && is_elsewhere();
    node_->kind = synchronous_        ? Kind::synchronous
        : known_.inplace_view         ? Kind::reshape
        : only_views && !writes_      ? Kind::view
                                      : Kind::deferred;
    const bool computes = node_->kind == Kind::deferred || (node_->kind == Kind::synchronous && !writes_);
    const bool asks = session().only_records && synchronous_ && is_written_down();
    node_->on_host =
        (on_host_ && computes) || fills_by_pointer() || is_the_hosts_own() || asks || brings_to_absent_card();
    for (const auto& output : node_->outputs) {
      if (output.kind == Out::fresh) pass_.on_host[output.value->slot] = node_->on_host && (asks || output.value->device.is_cpu());
    }
    node_->slots = static_cast<int>(pass_.bound.size());
  }

  Value* value_of(const at::Tensor& tensor, bool& fresh) {
    auto* storage = storage_of(tensor);
    int64_t offset = tensor.storage_offset();
    int slot = static_cast<int>(pass_.bound.size());
    const auto [original, begin] = stand_ins_ ? stand_ins_->original(tensor) : std::pair(storage, int64_t(0));
    if (original) {
      slot = pass_.slot_of.try_emplace(original, slot).first->second;
      offset += begin / static_cast<int64_t>(tensor.dtype().itemsize());
    } else if (const auto made = new_.find(storage); made != new_.end()) {
      slot = made->second;
    } else {
      new_[storage] = slot;
    }
    return value_at(slot, tensor, offset, fresh);
  }

  Value* value_at(int slot, const at::Tensor& tensor, int64_t offset, bool& fresh) {
    auto* storage = storage_of(tensor);
    const auto* impl = tensor.unsafeGetTensorImpl();
    fresh = static_cast<size_t>(slot) == pass_.bound.size();
    if (fresh) {
      pass_.bound.emplace_back(stand_ins_ ? WeakStorage(Storage()) : weak(storage));
      pass_.outside.emplace_back();
      pass_.values_of.emplace_back();
      pass_.on_host.push_back(0);
    }
    const bool is_number = impl->is_wrapped_number();
    const auto& known = pass_.values_of[slot];
    // what was made outside of a plan may be larger than when its operation was recorded
    const size_t nbytes = pass_.outside[slot] ? pass_.outside[slot]->nbytes()
        : known.empty()                       ? storage->nbytes()
                                              : known.front()->nbytes;
    for (Value* value : known) {
      if (value->fits(impl, offset) && value->is_number == is_number && value->nbytes == nbytes) return value;
    }
    const bool is_meta = stand_ins_ && session().estimates;
    auto value = std::make_unique<Value>(Value{
        slot, node_->value_count++, c10::DimVector(impl->sizes().begin(), impl->sizes().end()),
        c10::DimVector(impl->strides().begin(), impl->strides().end()), offset, impl->dtype(),
        is_meta ? keys_on(device_, tensor) : impl->key_set(), is_number, nbytes, is_meta ? device_ : tensor.device()});
    pass_.values_of[slot].push_back(value.get());
    node_->values.push_back(std::move(value));
    return node_->values.back().get();
  }

  Value* make_fresh_like(const Value& other) {
    auto value = std::make_unique<Value>(other);
    value->slot = static_cast<int>(pass_.bound.size());
    value->id = node_->value_count++;
    return add_slot(std::move(value));
  }

  Value* add_slot(std::unique_ptr<Value> value) {
    pass_.bound.emplace_back(WeakStorage(Storage()));
    pass_.outside.emplace_back();
    pass_.values_of.push_back({value.get()});
    pass_.on_host.push_back(0);
    node_->values.push_back(std::move(value));
    return node_->values.back().get();
  }

  Argument& push(Arg kind, bool written = false) {
    auto& argument = node_->arguments.emplace_back();
    argument.kind = kind;
    argument.written = written;
    tensors_.emplace_back();
    return argument;
  }

  void add_constant(Argument& argument, IValue value) {
    argument.constant = static_cast<int>(node_->constants.size());
    node_->constants.push_back(std::move(value));
  }

  // Whether it is a number of Python's, or one of the host's that an operation of a GPU is given. (A graph
  // would not see it change, so a capture takes those that the step writes down.)
  bool is_read_now(const at::Tensor& tensor) const {
    if (!is_number(tensor)) return false;
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return true;
    if (!on_device_ || known_.synchronous) return false;
    if (!session().only_records) return true;
    const auto known = pass_.slot_of.find(storage_of(tensor));
    return known != pass_.slot_of.end() && pass_.on_host[known->second];
  }

  // A slot that is no storage's: the next number has another one.
  Value* make_number_value(const at::Tensor& tensor) {
    auto value = std::make_unique<Value>(Value{
        static_cast<int>(pass_.bound.size()), node_->value_count++, {}, {}, 0, tensor.dtype(), tensor.key_set(),
        tensor.unsafeGetTensorImpl()->is_wrapped_number(), tensor.nbytes(), tensor.device()});
    return add_slot(std::move(value));
  }

  void add_tensor(const at::Tensor& tensor, bool written, bool is_only_read = false) {
    auto& argument = push(Arg::tensor, written);
    tensors_.back().tensor = tensor;
    if (!tensor.defined()) {
      argument.kind = Arg::undefined;
    } else if (!is_strided(tensor)) {
      argument.kind = Arg::opaque;
      synchronous_ = true;
      on_host_ = written_down_ = false;
    } else if (is_only_read && is_read_now(tensor)) {
      argument.kind = Arg::number;
      argument.value = make_number_value(tensor);
      node_->numbers.push_back(number_in(tensor));
    } else {
      bool fresh;
      check_own(storage_of(tensor));
      argument.value = value_of(tensor, fresh);
      const int slot = argument.value->slot;
      if (fresh) {
        pass_.outside[slot] = pass_.bound[slot].lock();
        pass_.on_host[slot] = session().only_records ? schema_.name() == LITERAL : is_tiny(tensor);
      }
      written_down_ &= pass_.on_host[slot] != 0;
      on_host_ &= pass_.on_host[slot] && is_tiny(tensor);
      tensors_.back().original = tensor;
      tensors_.back().storage = storage_of(tensor);
      tensors_.back().sizes = tensor.sizes().vec();
    }
  }

  void add_list(const IValue& value, bool written) {
    const auto elements = value.toListRef();
    const auto all = [&](auto&& is) { return std::all_of(elements.begin(), elements.end(), is); };
    const auto is_tensor = [](const IValue& each) { return each.isTensor(); };
    if (value.isTensorList() || std::any_of(elements.begin(), elements.end(), is_tensor)) {
      auto& head = push(Arg::tensors);
      head.count = static_cast<int>(elements.size());
      head.integer = !value.isTensorList();
      for (const auto& each : elements) {
        if (each.isNone()) push(Arg::none);
        else add_tensor(each.toTensor(), written);
      }
    } else if (!elements.empty() && elements[0].isTensorList()) {
      push(Arg::lists).count = static_cast<int>(elements.size());
      for (const auto& each : elements) add_list(each, written);
      synchronous_ = true;
    } else if (!elements.empty() && all([](const IValue& each) { return each.isDouble(); })) {
      auto& argument = push(Arg::reals);
      argument.count = static_cast<int>(elements.size());
      add_constant(argument, value.toList().copy());
      for (const auto& each : elements) node_->numbers.push_back(each.toScalar());
    } else if (all([](const IValue& each) { return each.isInt() || each.isBool(); })) {
      auto& argument = push(Arg::integers);
      argument.count = static_cast<int>(node_->integers.size());
      add_constant(argument, value.toList().copy());
      auto& integers = node_->integers.emplace_back();
      for (const auto& each : elements) integers.push_back(each.isBool() ? each.toBool() : each.toInt());
    } else {
      add_constant(push(Arg::constant), value.toList().copy());
    }
  }

  void add(const IValue& value, const c10::Argument& schema) {
    const bool written = (schema.alias_info() && schema.alias_info()->isWrite()) ||
        is_statistic(schema_.name(), schema.name());
    writes_ |= written;
    if (value.isTensor()) {
      add_tensor(value.toTensor(), written, !schema.alias_info());
    } else if (value.isNone()) {
      push(Arg::none);
    } else if (value.isBool()) {
      push(Arg::boolean).integer = value.toBool();
    } else if (value.isInt()) {
      const bool counts = schema.type()->kind() == c10::TypeKind::NumberType && !known_.exact;
      push(counts ? Arg::count : Arg::integer).integer = value.toInt();
      if (counts) node_->numbers.push_back(value.toScalar());
    } else if ((value.isDouble() || value.isComplexDouble()) && !known_.exact) {
      push(Arg::real).integer = value.isComplexDouble();
      node_->numbers.push_back(value.toScalar());
    } else if (value.isList()) {
      add_list(value, written);
    } else {
      // A generator of the user's own can be asked for its state at any time.
      synchronous_ |= value.isStorage() || value.isObject() || value.isPyObject() || value.isStream() ||
          value.isGenerator();
      add_constant(push(Arg::constant), value);
    }
  }

  // A mask's values decide the shape of what it selects.
  void check_masks() {
    for (size_t n = 1; n < tensors_.size(); n++) {
      const auto& tensor = tensors_[n].tensor;
      synchronous_ |= tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    }
  }

  // Whether the operation gave an argument another storage or shape, as `set_` and `resize_` do.
  bool arguments_have_changed() const {
    for (const auto& before : tensors_) {
      if (!before.storage) continue;
      if (storage_of(before.tensor) != before.storage) return true;
      if (!known_.inplace_view && before.tensor.sizes() != c10::IntArrayRef(before.sizes)) return true;
    }
    return false;
  }

  // Whether a tensor is not on the device of the session.
  bool is_elsewhere() const {
    const auto elsewhere = [](const Value* value) { return value && value->device.type() != session().device; };
    for (const auto& argument : node_->arguments) {
      if (argument.kind == Arg::tensor && elsewhere(argument.value)) return true;
    }
    for (const auto& output : node_->outputs) {
      if (elsewhere(output.value)) return true;
    }
    return false;
  }

  // Whether it is the host's alone, in a step on a GPU, or brings the host's bytes there. No such operation
  // is ever deferred, so it depends on none that is. (A draw depends on what seeds.)
  bool is_the_hosts_own() const {
    if (session().device == c10::kCPU || known_.random) return false;
    if (node_->kind != Kind::synchronous || (writes_ && known_.synchronous)) return false;
    bool reads = false;
    for (const auto& argument : node_->arguments) {
      if (argument.kind != Arg::tensor) continue;
      if (!argument.value->device.is_cpu()) return false;
      if (session().only_records && !pass_.on_host[argument.value->slot]) return false;  // it may change
      reads = true;
    }
    return reads || std::all_of(node_->outputs.begin(), node_->outputs.end(), [](const Output& one) {
      return !one.value || one.value->device.is_cpu();
    });
  }

  // Whether it only brings bytes of the host's to the card of an estimate: no kernel of the step does.
  bool brings_to_absent_card() const {
    if (!session().estimates || node_->kind != Kind::synchronous || known_.synchronous) return false;
    return std::none_of(node_->outputs.begin(), node_->outputs.end(), [](const Output& one) {
      return one.value && one.value->device.is_cpu();
    });
  }

  // C++ above us makes small tensors of the CPU with `empty` and fills them by address.
  bool fills_by_pointer() const {
    const auto& name = schema_.name();
    if (name != "aten::empty" && name != "aten::empty_strided") return false;
    if (node_->outputs.size() != 1 || node_->outputs[0].kind != Out::fresh) return false;
    const auto& value = *node_->outputs[0].value;
    return value.device.is_cpu() && value.nbytes <= 16384;
  }

  // Whether a result has no storage of its own.
  bool add_result(const IValue& value) {
    if (value.isTensor()) return add_made(value.toTensor());
    if (value.isTensorList()) {
      const auto made = value.toTensorVector();
      node_->outputs.push_back({Out::list, static_cast<int>(made.size())});
      bool only_views = true;
      for (const auto& tensor : made) only_views &= add_made(tensor);
      return only_views;
    }
    node_->outputs.push_back(value.isInt() ? Output{Out::integer, static_cast<int>(value.toInt())} : Output{Out::other});
    homes_.push_back(0);
    synchronous_ |= !value.isNone() && !value.isInt();
    return true;
  }

  bool add_made(const at::Tensor& tensor) {
    const bool has_home = tensor.defined() && is_strided(tensor);
    const bool has_bytes = has_home && !session().estimates;
    homes_.push_back(has_bytes ? reinterpret_cast<uint64_t>(storage_of(tensor)->data()) : 0);
    Output output{Out::undefined};
    bool is_view = true;
    if (tensor.defined()) {
      for (size_t n = 0; n < tensors_.size() && output.kind != Out::self; n++) {
        if (tensors_[n].tensor.defined() && tensors_[n].tensor.is_same(tensor)) {
          output.kind = Out::self;
          output.argument = static_cast<int>(n);
        }
      }
      if (output.kind != Out::self && !is_strided(tensor)) {
        output.kind = Out::other;
        synchronous_ = true;
      } else if (output.kind != Out::self) {
        bool fresh;
        output.value = value_of(tensor, fresh);
        output.kind = fresh ? Out::fresh : Out::alias;
        is_view = !fresh;
        on_host_ &= stand_ins_ && session().estimates ? is_tiny_there(tensor) : is_tiny(tensor);
      }
    }
    node_->outputs.push_back(output);
    return is_view;
  }

  // Whether a result that stands on `meta` is tiny where it will be.
  bool is_tiny_there(const at::Tensor& tensor) const {
    const bool one = tensor.numel() == 1 || at::isIntegralType(tensor.scalar_type(), true);
    return one && is_tiny(tensor.dtype(), storage_of(tensor)->nbytes(), device_);
  }

  struct Given {
    at::Tensor tensor;
    at::Tensor original;  // for which a stand-in may stand
    std::vector<int64_t> sizes;
    StorageImpl* storage = nullptr;
  };

  Pass& pass_;
  const Operator& known_;
  const c10::FunctionSchema& schema_;
  std::unique_ptr<Node> own_;
  Node* node_;
  std::vector<Given> tensors_;  // by flat argument; stand-ins, while the operation runs on them
  const StandIns* stand_ins_ = nullptr;                 // whose results are taken
  std::unordered_map<StorageImpl*, int> new_;           // the slots of its new storages
  std::vector<uint64_t> homes_;                         // by result: the address of its storage
  c10::Device device_ = c10::kCPU;                      // of an estimate's results
  size_t slots_given_ = 0;                              // after the arguments
  bool synchronous_ = false, on_host_ = true, written_down_ = true, writes_ = false, on_device_ = false;
};

// A plan is of one process, and knows nothing of the order in which others send.
[[noreturn]] inline void refuse_collective(const std::string& line, const std::string& name) {
  const auto why = line + ": " + name +
      " is done by several processes together, and a plan is of one. Train this module without offloading, on several"
      " devices of one machine with OffloadStrategy(devices=k), or over machines with ElasticStrategy";
  pybind11::gil_scoped_acquire python;
  PyErr_SetString(pybind11::module_::import("offload.errors").attr("CaptureError").ptr(), why.c_str());
  throw pybind11::error_already_set();
}

inline void record(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto& now = session();
  auto& pass = *now.pass;
  if (traits_of(op).collective) refuse_collective(users_line(now), op.schema().name());
  Recording recording(pass, now.current, op, keys);
  const bool can_wait = recording.try_stand_ins(op, keys, stack);
  recording.node().where = users_line(now);
  const auto append = [&] {
    auto node = recording.take();
    auto* added = node.get();
    now.current->children.push_back(std::move(node));
    return added;
  };
  if (can_wait) {
    if (now.only_records && recording.reshapes_given()) settle();
    issue(recording.node(), {}, op, keys, stack, append);
    return;
  }
  if (now.estimates && run_evaluated(recording.node(), op, stack)) {
    recording.take_results(*stack);
    now.current = append();
    pass.path.push_back(now.current);
    pass.ran.push_back(1);
    return;
  }
  const auto given = arguments_of(op, stack);
  bool is_awaited_by_none = now.only_records ? recording.is_written_down() : recording.is_on_host();
  each_storage(given, [&](StorageImpl* storage) { is_awaited_by_none &= !is_awaited(storage); });
  if (!is_awaited_by_none) settle();
  each_storage(given, touch);
  run_now(op, keys, stack);
  recording.take_results(*stack);
  now.current = append();
  pass.path.push_back(now.current);
  pass.ran.push_back(1);
}

// An operation of an estimate between two steps: it is on no tape, and its results have no bytes.
inline void estimate_off_tape(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto& now = session();
  const auto given = arguments_of(op, stack);
  Node root;
  const auto before = std::exchange(now.pass, new_pass(now.used_passes));
  const auto put_back = std::shared_ptr<void>(nullptr, [&](void*) { now.pass = before; });
  Recording recording(*now.pass, &root, op, keys);
  if (!recording.try_stand_ins(op, keys, stack) || recording.must_run()) refuse_value();
  for (const auto& argument : recording.node().arguments) {
    if (argument.kind == Arg::tensor && argument.written) now.known.erase(now.pass->outside[argument.value->slot].get());
  }
  push_shadows(*now.pass, recording.node(), stack, given);
}

}  // namespace live
