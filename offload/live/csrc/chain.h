// Calls without arguments, one after the other. Those of ours run without Python in between, and what they return
// becomes no object of Python's: of a small kernel that would be half of the time.

#pragma once

#include "binding.h"
#include "placed_call.h"

namespace live {

struct Link {
  py::object call;
  BoundCall* bound = nullptr;    // if it is one of ours
  PlacedCall* placed = nullptr;  // if its allocations are served
};

// What a function of C has in its capsule of this name; null if it is none.
template <class T>
T* in_capsule(PyObject* call, const char* name) {
  if (!PyCFunction_Check(call)) return nullptr;
  auto* capsule = PyCFunction_GetSelf(call);
  return PyCapsule_IsValid(capsule, name) ? static_cast<T*>(PyCapsule_GetPointer(capsule, name)) : nullptr;
}

class Chain {
 public:
  explicit Chain(const py::tuple& calls) {
    for (const auto& each : calls) {
      auto* placed = in_capsule<PlacedCall>(each.ptr(), PLACED_CALL);
      auto* bound = in_capsule<BoundCall>(placed ? placed->call : each.ptr(), BOUND);
      links_.push_back({py::reinterpret_borrow<py::object>(each), bound, placed});
    }
  }

  void run() {
    py::gil_scoped_release let_go;
    for (auto& link : links_) {
      if (link.bound) {
        run_bound(link);
      } else {
        py::gil_scoped_acquire held;
        link.call();
      }
    }
  }

 private:
  static void run_bound(Link& link) {
    if (run_placed(link)) {
      py::gil_scoped_acquire held;
      const auto result = link.bound->result();
      if (!link.placed->settle(link.placed, result.ptr())) throw py::error_already_set();
    } else {
      link.bound->drop_result();
    }
  }

  // Whether somebody has to see the result.
  static bool run_placed(Link& link) {
    if (!link.placed) {
      link.bound->run();
      return false;
    }
    link.placed->begin(link.placed);
    try {
      link.bound->run();
    } catch (...) {
      link.placed->end(link.placed);
      throw;
    }
    return link.placed->end(link.placed);
  }

  std::vector<Link> links_;
};

constexpr const char* CHAIN = "live.chain";

inline PyObject* run_chain(PyObject* capsule, PyObject*) {
  HANDLE_TH_ERRORS
  static_cast<Chain*>(PyCapsule_GetPointer(capsule, CHAIN))->run();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline py::object chain(const py::tuple& calls) {
  static PyMethodDef method{"run", &run_chain, METH_NOARGS, "Run the calls."};
  return function_over<Chain>(method, CHAIN, std::make_unique<Chain>(calls));
}

}  // namespace live
