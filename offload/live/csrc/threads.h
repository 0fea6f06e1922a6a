// Every thread of the user's may have a session. Others work for it:
//
//   a thread that goes backward      autograd gives it what the caller's thread carries
//   the helper that runs its parts   it serves one session only

#pragma once

#include <ATen/ThreadLocalPythonObjects.h>

namespace live {

struct Session;

// The session that this thread has opened or serves, and the one that its present operation belongs to.
static thread_local Session* own = nullptr;
static thread_local Session* current = nullptr;

// What autograd carries from thread to thread. It holds no object of Python's.
struct Carried : c10::SafePyObject {
  explicit Carried(Session* its) : SafePyObject(nullptr, nullptr), session(its) {}
  Session* session;
};

constexpr const char* CARRIED = "live.session";

inline void carry(Session* session) {
  at::impl::ThreadLocalPythonObjects::set(CARRIED, std::make_shared<Carried>(session));
}

// The session of this thread; null if it has none.
inline Session* session_here() {
  using at::impl::ThreadLocalPythonObjects;
  if (own || !ThreadLocalPythonObjects::contains(CARRIED)) return own;
  return static_cast<const Carried&>(*ThreadLocalPythonObjects::get(CARRIED)).session;
}

struct Serving {
  Session* before = current;
  explicit Serving(Session* now) { current = now; }
  ~Serving() { current = before; }
};

}  // namespace live
