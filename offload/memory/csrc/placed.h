// What both allocators share: how an op's allocations are put where the plan says.
//
//   slots   (64, a) (32, b) (64, a)         run(): op allocates 64, 32, 64 bytes: gets a, b, a
//
// serve   The k-th allocation of a call on its thread gets the k-th slot's address, if it asks for
//         exactly that many bytes; a slot without an address goes to the base. The first one that
//         does not fit, and all after it, go to the base: that is a miss, after which `settle` runs.
// record  Every allocation and every free of this thread is written down.
// count   Bytes that the base gave out, of all threads: how many live at once.
// reuse   Large blocks that this thread frees are kept for its next calls: fresh pages of the system's
//         cost more than most kernels that write them.
// else    Straight to the base.
//
// Nobody frees a served address: memory of an arena has an owner already. Whoever frees through
// raw_deallocate reaches `release`, which knows the addresses that a living table may serve.
//
// Whoever includes this, once in a library, sets `base` and asks `served` before every allocation.
// Only c10's headers are needed. What is used of Python is its stable interface, declared here.

#pragma once

#include <c10/core/Allocator.h>
#include <pthread.h>

#include "placed_call.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

extern "C" {
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject*, PyObject*);
  int flags;
  const char* doc;
};
extern PyObject _Py_NoneStruct;
PyObject* PyObject_CallObject(PyObject* callable, PyObject* args);
PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
int PyObject_IsTrue(PyObject*);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* PyCapsule_New(void* pointer, const char* name, void (*destructor)(PyObject*));
void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
}

namespace {

struct Slot {
  uint64_t nbytes;
  void* address; // null: from the base
};

struct Event {
  uint64_t nbytes; // 0: freed
  void* address;
};

// What happens to this thread's allocations now.
struct Thread {
  const Slot* next = nullptr;
  const Slot* end = nullptr;
  bool serving = false;
  bool missed = false;
  bool reuses = false;
  int device = 0;
  std::vector<Event>* log = nullptr;
};
thread_local Thread here;

struct Counted {
  uint64_t nbytes;
  uint64_t session; // which counting it belongs to
};

// Never destroyed: threads may still free when the process ends.
struct Shared {
  std::mutex mutex;
  std::unordered_map<void*, int> served; // address -> how many slots have it
  std::unordered_map<void*, Counted> watched; // what the base gave while someone watched
  std::atomic<int> watchers{0}; // recorders, and the counting
  int recorders = 0;
  bool counting = false;
  uint64_t session = 0, live = 0, peak = 0, passed = 0, elsewhere = 0;
  int reusers = 0; // threads
  std::unordered_map<void*, uint64_t> reusable; // blocks in use that are kept when they are freed
  std::multimap<uint64_t, void*> kept;
  uint64_t kept_bytes = 0;
};
constexpr uint64_t LARGE = 256 << 10, MOST_KEPT = 256 << 20;
Shared& shared = *new Shared;
c10::Allocator* base = nullptr;

void leave(void*) {}

// Write down what the base gave, if somebody watches.
void* note(void* address, uint64_t nbytes) {
  if (shared.watchers.load(std::memory_order_relaxed) == 0 || nbytes == 0) {
    return address;
  }
  if (here.log) {
    here.log->push_back({nbytes, address});
  }
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.watched[address] = {nbytes, shared.counting ? shared.session : 0};
  shared.elsewhere += shared.recorders && !here.log ? nbytes : 0;
  if (shared.counting) {
    shared.passed += 1;
    shared.live += nbytes;
    shared.peak = std::max(shared.peak, shared.live);
  }
  return address;
}

// Keep a block that a call has freed. False: it is freed.
bool keep_block(void* address) {
  const auto found = shared.reusable.find(address);
  if (found == shared.reusable.end()) {
    return false;
  }
  const uint64_t nbytes = found->second;
  shared.reusable.erase(found);
  if (shared.reusers == 0 || shared.kept_bytes + nbytes > MOST_KEPT) {
    return false;
  }
  shared.kept.emplace(nbytes, address);
  shared.kept_bytes += nbytes;
  return true;
}

// Take a kept block that is not much too large; null: there is none.
void* take_kept(uint64_t nbytes) {
  std::lock_guard<std::mutex> lock(shared.mutex);
  const auto found = shared.kept.lower_bound(nbytes);
  if (found == shared.kept.end() || found->first > nbytes + nbytes / 4) {
    return nullptr;
  }
  void* address = found->second;
  shared.reusable[address] = found->first;
  shared.kept_bytes -= found->first;
  shared.kept.erase(found);
  return address;
}

// Write down that something is freed. False: nobody frees it, because it was served or is kept.
bool note_free(void* address) {
  bool stays = false;
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    if (shared.served.count(address)) {
      return false;
    }
    auto found = shared.watched.find(address);
    if (found != shared.watched.end()) {
      if (shared.counting && found->second.session == shared.session) {
        shared.live -= found->second.nbytes;
      }
      shared.watched.erase(found);
    }
    stays = keep_block(address);
  }
  if (here.log && address) {
    here.log->push_back({0, address});
  }
  return !stays;
}

void release(void* address) {
  if (note_free(address)) {
    base->raw_deleter()(address);
  }
}

c10::DataPtr pass(size_t nbytes) {
  const bool reuses = here.reuses && nbytes >= LARGE;
  if (void* address = reuses ? take_kept(nbytes) : nullptr) {
    return {note(address, nbytes), address, &release, c10::DeviceType::CPU};
  }
  c10::DataPtr given = base->allocate(nbytes);
  if (reuses && given.compare_exchange_deleter(base->raw_deleter(), &release)) {
    note(given.get(), nbytes);
    std::lock_guard<std::mutex> lock(shared.mutex);
    shared.reusable[given.get()] = nbytes;
  } else if (shared.watchers.load(std::memory_order_relaxed) != 0 && nbytes != 0 &&
      given.compare_exchange_deleter(base->raw_deleter(), &release)) {
    note(given.get(), nbytes);
  }
  return given;
}

// The planned address of this thread's next allocation; null: it goes to the base.
void* take_planned(size_t nbytes) {
  if (!here.serving || nbytes == 0) {
    return nullptr;
  }
  if (here.next == here.end || here.next->nbytes != nbytes) {
    here.missed = true;
    here.next = here.end;
    return nullptr;
  }
  return (here.next++)->address;
}

// A child process must not inherit a lock that another thread held.
void mind_forks() {
  pthread_atfork(
      [] { shared.mutex.lock(); },
      [] { shared.mutex.unlock(); },
      [] { shared.mutex.unlock(); });
}

// A call and the slots of its allocations: the `self` of what `placed_bind` returns.
struct Bound : PlacedCall {
  std::vector<Slot> slots;
  PyObject* settler;
  int device;
  bool settled = false;
  Thread before; // this thread's, while it serves
};

Bound* of_capsule(PyObject* capsule) {
  return static_cast<Bound*>(static_cast<PlacedCall*>(PyCapsule_GetPointer(capsule, PLACED_CALL)));
}

void begin_serving(PlacedCall* call) {
  auto* bound = static_cast<Bound*>(call);
  bound->before = here;
  here.next = bound->slots.data();
  here.end = here.next + bound->slots.size();
  here.serving = true;
  here.missed = false;
  here.device = bound->device;
}

bool end_serving(PlacedCall* call) {
  auto* bound = static_cast<Bound*>(call);
  const bool missed = here.missed || here.next != here.end;
  here = bound->before;
  return missed || !bound->settled;
}

bool settle(PlacedCall* call, PyObject* result) {
  auto* bound = static_cast<Bound*>(call);
  PyObject* again = PyObject_CallFunctionObjArgs(bound->settler, result, nullptr);
  if (!again) {
    return false;
  }
  bound->settled = !PyObject_IsTrue(again);
  Py_DecRef(again);
  return true;
}

PyObject* run(PyObject* capsule, PyObject*) {
  auto* bound = of_capsule(capsule);
  begin_serving(bound);
  PyObject* result = PyObject_CallObject(bound->call, nullptr);
  const bool sees = end_serving(bound); // also after an exception
  if (!result) {
    return nullptr;
  }
  const bool fine = !sees || settle(bound, result);
  Py_DecRef(result);
  if (!fine) {
    return nullptr;
  }
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

void unbind(PyObject* capsule) {
  auto* bound = of_capsule(capsule);
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    for (const Slot& slot : bound->slots) {
      auto found = shared.served.find(slot.address);
      if (found != shared.served.end() && --found->second == 0) {
        shared.served.erase(found);
      }
    }
  }
  Py_DecRef(bound->call);
  Py_DecRef(bound->settler);
  delete bound;
}

constexpr int NO_ARGUMENTS = 0x0004; // METH_NOARGS
PyMethodDef method = {"run", &run, NO_ARGUMENTS, "Runs a call at its planned addresses."};

} // namespace

extern "C" {

// A Python callable without arguments: `call()`, its allocations served. `settler(result)` is called
// after the first run, after every run with a miss, and again after the next run if it returns true.
PyObject* placed_bind(
    PyObject* call,
    PyObject* settler,
    const Slot* slots,
    uint64_t count,
    int device) {
  auto* bound = new Bound{{call, &begin_serving, &end_serving, &settle}, {slots, slots + count}, settler, device};
  Py_IncRef(call);
  Py_IncRef(settler);
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    for (const Slot& slot : bound->slots) {
      if (slot.address) {
        shared.served[slot.address] += 1;
      }
    }
  }
  PyObject* capsule = PyCapsule_New(static_cast<PlacedCall*>(bound), PLACED_CALL, &unbind);
  PyObject* callable = PyCFunction_NewEx(&method, capsule, nullptr);
  Py_DecRef(capsule);
  return callable;
}

// From here to `placed_record_end` this thread's allocations and frees are written down.
void placed_record_begin() {
  here.log = new std::vector<Event>;
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.watchers += 1;
  shared.recorders += 1;
  shared.elsewhere = 0;
}

// How many events there are; the first `room` of them go to `events`. `elsewhere`: how many
// bytes other threads were given meanwhile. Recording ends when `events` is given.
uint64_t placed_record_end(Event* events, uint64_t room, uint64_t* elsewhere) {
  const uint64_t count = here.log ? here.log->size() : 0;
  if (events && here.log) {
    std::copy_n(here.log->begin(), std::min(room, count), events);
    delete here.log;
    here.log = nullptr;
    std::lock_guard<std::mutex> lock(shared.mutex);
    shared.watchers -= 1;
    shared.recorders -= 1;
    *elsewhere = shared.elsewhere;
  }
  return count;
}

// Whether this thread's large blocks are kept when they are freed. When no thread wants that any more,
// all that is kept is freed.
void placed_reuse(int on) {
  if (here.reuses == (on != 0)) {
    return;
  }
  here.reuses = on;
  std::multimap<uint64_t, void*> over;
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    shared.reusers += on ? 1 : -1;
    if (shared.reusers == 0) {
      over.swap(shared.kept);
      shared.kept_bytes = 0;
    }
  }
  for (const auto& [nbytes, address] : over) {
    base->raw_deleter()(address);
  }
}

void placed_count_begin() {
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.watchers += !shared.counting;
  shared.counting = true;
  shared.session += 1;
  shared.live = shared.peak = shared.passed = 0;
}

// out: the most bytes that lived at once, how many live now, how many allocations there were.
void placed_count(uint64_t out[3]) {
  std::lock_guard<std::mutex> lock(shared.mutex);
  out[0] = shared.peak;
  out[1] = shared.live;
  out[2] = shared.passed;
}

void placed_count_end() {
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.watchers -= shared.counting;
  shared.counting = false;
}

} // extern "C"
