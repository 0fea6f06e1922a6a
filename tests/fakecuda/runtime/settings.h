// What the environment says of the fake GPU. It is read once, when the library is loaded.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace fake {

inline long number_of(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atol(value) : otherwise;
}

// Each stream has a thread of its own. Otherwise work is done where it is issued.
inline const bool ASYNC = number_of("FAKE_CUDA_ASYNC", 0);
// The longest delay before a piece of a stream's work, in microseconds, where streams have threads.
inline const long JITTER = number_of("FAKE_CUDA_JITTER", 200);
// A graph's nodes run in a random order among those that its edges allow.
inline const bool SHUFFLE = number_of("FAKE_CUDA_SHUFFLE", 0);
inline const int DEVICES = number_of("FAKE_CUDA_DEVICES", 1);
// Memory of each device.
inline const size_t MEMORY = static_cast<size_t>(number_of("FAKE_CUDA_MIB", 8192)) << 20;
// Errors are printed where they are returned.
inline const bool VERBOSE = number_of("FAKE_CUDA_VERBOSE", 0);
// The process ends at a launch of a compiled kernel, for a debugger to tell who launched it.
inline const bool ABORT = number_of("FAKE_CUDA_ABORT", 0);

}  // namespace fake
