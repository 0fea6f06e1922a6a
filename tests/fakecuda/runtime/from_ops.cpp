// The door for the ops: they put their CPU kernels on streams.
#include "from_ops.h"

#include <memory>

#include "errors.h"
#include "settings.h"
#include "streams.h"

API void fakecuda_launch(void* stream, void (*call)(void*), void* argument, void (*drop)(void*),
                         const char* name) {
  std::shared_ptr<void> kept(argument, drop);
  fake::enqueue(static_cast<cudaStream_t>(stream), [call, kept] { call(kept.get()); }, name);
}

API int fakecuda_capturing(void* stream) {
  return fake::stream_of(static_cast<cudaStream_t>(stream))->capture != nullptr;
}

API int fakecuda_async() { return fake::ASYNC; }
