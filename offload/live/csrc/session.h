// What is known between the operations of a step, and between steps. A session is one thread's (threads.h).

#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <set>

#include "histories.h"
#include "tape.h"

namespace live {

enum class Mode : uint8_t {
  off,
  between,    // no step: an operation runs at once, and whatever it reads becomes real first
  recording,  // an operation goes onto the tape; it is deferred, and gives shadows
  replaying,  // it is on the tape already
};

// Somebody has a pointer to the bytes of a storage.
struct Exposure {
  WeakStorage storage;
  bool was_resizable;  // numpy forbids it
  int arrays = 0;      // of numpy's, which are alive
  bool for_good = false;
};

// A step that is over for Python, and whose kernels another thread still runs. What it was given was
// copied, and all that its kernels write is barred.
struct PendingStep {
  bool draws = false;  // from the generators of the process
  std::unordered_map<StorageImpl*, WeakStorage> pending;
};

struct Session : std::enable_shared_from_this<Session> {
  Mode mode = Mode::off;
  c10::DeviceType device = c10::kCPU;  // where kernels are deferred
  bool plans_at_once = false;          // what runs for the first time, too
  bool may_draw = true;                // from the generators of the process
  bool draws = false;                  // whether a step has
  bool only_records = false;           // nothing runs: a step that needs a value is refused
  bool estimates = false;              // nothing has bytes but what the host computes with
  std::unordered_map<StorageImpl*, at::Tensor> known;  // the bytes of an estimate's batch, on the host
  std::vector<Storage> known_kept;     // ... whose addresses are not used anew
  std::unordered_map<c10::TensorImpl*, torch::autograd::AutogradMeta> accumulators;  // of gradients, of what it hides
  std::string refusal;                 // why the latest operation has no estimate
  Histories histories;                 // of what it writes
  std::map<std::string, std::unique_ptr<Node>> trees;
  Node* current = nullptr;
  std::shared_ptr<Pass> pass;
  std::unique_ptr<PendingStep> pending_step;  // of the step before
  Passes used_passes = std::make_shared<Passes::element_type>();
  std::unordered_map<StorageImpl*, WeakStorage> pending;  // the user's storages that wait for a write
  std::set<StorageImpl*> numbers_read;           // single numbers that a deferred kernel will read
  std::vector<WeakStorage> numbers_read_kept;    // ... and keeps their addresses from being used anew
  std::unordered_map<StorageImpl*, std::unique_ptr<Adopted>> adopted;
  std::vector<Adopted*> shown;
  int next_adopted = 0;
  std::unordered_map<StorageImpl*, Exposure> exposed;
  pybind11::object place;                        // gives the user's line
  pybind11::object run_part;                     // runs what was issued by a plan, if there can be one
  pybind11::object wait_for_step;                // waits for the pending_step
  void (*watch)() = nullptr;                     // of the allocator shim: this thread's allocations from now on
  uint64_t (*watched)(Tried::Event*, uint64_t, uint64_t*) = nullptr;  // ... and what they were
  void (*reuse)(int) = nullptr;                  // of the allocator shim: whether large blocks are kept
  std::string divergence;  // how the latest step left its tape
};

inline Session& session() {
  auto* found = current ? current : session_here();
  TORCH_CHECK(found, "this thread has no live session");
  return *found;
}

inline std::vector<Adopted*>& shown() { return session().shown; }

inline void check_own(StorageImpl* storage) {
  if (!is_barred(storage)) return;
  const auto* here = session_here();
  const auto* absent = absent_of(storage);
  const auto waits = [&](const auto& pending) { return pending.count(storage) > 0; };
  const bool own = absent ? !absent->owner || absent->owner == here
                          : here && (waits(here->pending) || (here->pending_step && waits(here->pending_step->pending)));
  TORCH_CHECK(own, NOT_THERE);
}

// Those that are open. They, and what they have adopted, change with the GIL only.
inline std::vector<Session*>& sessions() {
  static std::vector<Session*> all;
  return all;
}

// Raises if a home of another session's has the bytes: they move when it likes.
inline void check_not_anothers(StorageImpl* storage) {
  check_own(storage);
  for (auto* other : sessions()) {
    TORCH_CHECK(
        other == session_here() || !other->adopted.count(storage),
        "the session of another thread has this tensor, and moves its bytes: give a copy");
  }
}

// While a step is recorded, every operation gets the memory of the one before.
inline void reuse_blocks(bool on) {
  if (session().reuse) session().reuse(on);
}

struct WithoutGil {
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// Whether memory of the user's may be read or written behind our back, by address: it came from numpy,
// it is shared with processes, or it was given to numpy, which forbids to resize it.
inline bool is_exposed(StorageImpl* storage) {
  if (absent_of(storage)) return false;
  const auto& data = storage->_mutable_data_ptr_no_checks();
  const bool foreign = !storage->allocator() || (storage->device().is_cpu() && !storage->resizable());
  if (foreign && data.get_deleter() != &drop_share && data.get()) return true;
  return session().exposed.count(storage) > 0;
}

inline std::string users_line(const Session& now) {
  pybind11::gil_scoped_acquire python;
  return now.place().cast<std::string>();
}

// A deferred kernel will write this storage: nobody may read it before.
inline void await_write(Pass& pass, int slot) {
  const auto storage = pass.bound[slot].lock();
  if (!storage || absent_of(storage.get())) return;
  if (!is_barred(storage.get())) bar(storage.get());
  session().pending.emplace(storage.get(), storage);
}

// Wait for the kernels of the step before. If one of them has raised, nothing of this step runs.
inline void wait_for_step() {
  auto* now = current ? current : session_here();
  if (!now || !now->pending_step) return;
  pybind11::gil_scoped_acquire python;
  try {
    now->wait_for_step();
  } catch (...) {
    if (now->pass) now->pass->failed = true;
    throw;
  }
}

// Another thread runs the kernels of this pass from now on.
inline void submit(const Pass& pass) {
  auto& now = session();
  auto pending_step = std::make_unique<PendingStep>();
  for (size_t n = 0; n < pass.path.size(); n++) pending_step->draws |= !pass.ran[n] && pass.path[n]->random;
  pending_step->pending = std::exchange(now.pending, {});
  now.numbers_read.clear();
  now.numbers_read_kept.clear();
  now.pending_step = std::move(pending_step);
}

// The kernels of the pending step have ended. What this step will write stays barred.
inline void complete() {
  auto& now = session();
  const auto pending_step = std::move(now.pending_step);
  for (auto& [address, waiting] : pending_step->pending) {
    const auto storage = waiting.lock();
    if (storage && !absent_of(storage.get()) && !now.pending.count(address)) unbar(storage.get());
  }
}

inline void clear_pending() {
  auto& now = session();
  for (auto& [address, waiting] : now.pending) {
    const auto storage = waiting.lock();
    if (storage && !absent_of(storage.get())) unbar(storage.get());
  }
  now.pending.clear();
  now.numbers_read.clear();
  now.numbers_read_kept.clear();
}

// A random operation of a step draws, unless it is attention without dropout.
inline void note_draw(const c10::FunctionSchema& schema, at::ArrayRef<IValue> given) {
  for (size_t n = 0; n < given.size(); n++) {
    if (schema.arguments()[n].name() == "dropout_p" && given[n].isDouble() && given[n].toDouble() == 0) return;
  }
  auto& now = session();
  now.draws = true;
  TORCH_CHECK(now.may_draw, "this step draws random numbers, and none before it did, so others may draw"
      " beside it: the next one is kept apart from them");
}

inline bool is_awaited(StorageImpl* storage) {
  return is_barred(storage) || session().numbers_read.count(storage) > 0;
}

}  // namespace live
