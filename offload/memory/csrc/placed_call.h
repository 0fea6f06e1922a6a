// What `placed_bind` (placed.h) keeps in the capsule of its callable: others run the call by it, as a
// part of theirs.

#pragma once

typedef struct _object PyObject;

struct PlacedCall {
  PyObject* call; // a callable without arguments
  void (*begin)(PlacedCall*); // this thread's allocations are served from now on ...
  bool (*end)(PlacedCall*); // ... until now. True: `settle` has to see the result
  bool (*settle)(PlacedCall*, PyObject* result); // with the interpreter's lock. False: it has raised
};

constexpr const char* PLACED_CALL = "offload.placed_call";
