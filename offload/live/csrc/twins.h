// Operations of a tape that are the same but for their bytes, as in equal layers: what one of them
// makes on stand-ins, the others make, too.

#pragma once

#include "session.h"

namespace live {

inline bool same_geometry(const Value& a, const Value& b) {
  return a.sizes == b.sizes && a.strides == b.strides && a.offset == b.offset && a.dtype == b.dtype && a.keys == b.keys &&
      a.is_number == b.is_number && a.nbytes == b.nbytes && a.device == b.device;
}

inline bool same_argument(const Node& one, const Argument& a, const Node& other, const Argument& b) {
  if (a.kind != b.kind || a.written != b.written || a.integer != b.integer || !a.value != !b.value) return false;
  if (a.value && !same_geometry(*a.value, *b.value)) return false;
  if (a.kind == Arg::integers) return one.integers[a.count] == other.integers[b.count];
  if (a.kind == Arg::constant) return one.constants[a.constant] == other.constants[b.constant];
  return a.count == b.count;
}

// `other` has its results, and `one` none yet.
inline bool are_twins(const Node& one, const Node& other) {
  if (other.kind != Kind::deferred || other.on_host || one.random || one.keys != other.keys || one.grad != other.grad ||
      one.dispatch.included() != other.dispatch.included() || one.dispatch.excluded() != other.dispatch.excluded()) {
    return false;
  }
  for (const auto& output : other.outputs) {
    if (output.kind != Out::fresh && output.kind != Out::self && output.kind != Out::undefined) return false;
  }
  const auto count = one.arguments.size();
  bool is_real = false;  // or else the default type may decide
  for (size_t n = 0; n < count; n++) {
    const auto &a = one.arguments[n], &b = other.arguments[n];
    if (!same_argument(one, a, other, b)) return false;
    if (a.kind != Arg::tensor) continue;
    is_real |= at::isFloatingType(a.value->dtype.toScalarType());
    for (size_t m = 0; m < n; m++) {
      const auto *c = one.arguments[m].value, *d = other.arguments[m].value;
      if (c && (c->slot == a.value->slot) != (d->slot == b.value->slot)) return false;
    }
  }
  return is_real;
}

}  // namespace live
