// What `placed_bind` (placed.h) keeps in the capsule of its callable, so that other libraries can run
// the call as a part of theirs.

#pragma once

typedef struct _object PyObject;

struct PlacedCall {
  PyObject* call; // a callable without arguments
  void (*begin)(PlacedCall*); // from now on this thread's allocations are served ...
  bool (*end)(PlacedCall*); // ... until now. True: `settle` has to see the result
  bool (*settle)(PlacedCall*, PyObject* result); // needs the interpreter's lock. False: it has raised
};

constexpr const char* PLACED_CALL = "offload.placed_call";
