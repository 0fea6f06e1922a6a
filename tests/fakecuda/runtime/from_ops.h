// What the ops (../ops/) call of the runtime, beside CUDA's own functions.
#pragma once

extern "C" {
// Gives a stream `call(argument)` to do. `drop(argument)` follows when nobody needs it any more: a
// captured one is needed by its graph.
void fakecuda_launch(void* stream, void (*call)(void*), void* argument, void (*drop)(void*),
                     const char* name);
int fakecuda_capturing(void* stream);
// Whether streams have threads of their own.
int fakecuda_async();
}
