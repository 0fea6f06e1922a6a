// Memory: of a device, page-locked and pageable memory of the host, and copies between them.
//
// Memory of a device is memory of the host, so a host may read it, which a GPU would not allow.
// What is allocated holds NaN, and what is freed is unmapped: who reads it is told, or ends.
// Copies keep CUDA's promises about time: one from pageable memory has read it when the call
// returns, one to pageable memory has ended then, all others run on their stream. Capturing a copy
// of pageable memory is an error. To unlock memory waits for nothing, since CUDA promises no such
// wait: a copy that comes to it afterwards loses the device.
// Pools of memory are not played: cudaMallocAsync is cudaMalloc.
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "captures.h"
#include "devices.h"
#include "errors.h"
#include "loss.h"
#include "settings.h"
#include "streams.h"

namespace {

constexpr size_t GRANULE = 512;
constexpr size_t PAGE = 4096;
// The byte whose repetition is NaN in every floating dtype.
constexpr int NAN_BYTE = 0xFF;
// The largest block that is filled: more takes too long, and is zero.
constexpr size_t LARGEST_FILLED = size_t{64} << 20;

enum class Kind { DEVICE, ALLOCATED, REGISTERED };

struct Block {
  size_t bytes;
  Kind kind;
  int device;
};

// Blocks by their first address.
class Blocks {
 public:
  using Place = std::map<uintptr_t, Block>::iterator;

  Place holding(const void* pointer, size_t bytes = 1) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) return none();
    --next;
    return address + bytes <= next->first + next->second.bytes ? next : none();
  }
  bool overlaps(const void* pointer, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    for (const auto& [start, block] : blocks_) {
      if (start < address + bytes && address < start + block.bytes) return true;
    }
    return false;
  }
  Place at(const void* pointer) { return blocks_.find(reinterpret_cast<uintptr_t>(pointer)); }
  void add(const void* pointer, Block block) {
    blocks_[reinterpret_cast<uintptr_t>(pointer)] = block;
  }
  void remove(Place place) { blocks_.erase(place); }
  Place none() { return blocks_.end(); }

 private:
  std::map<uintptr_t, Block> blocks_;
};

struct Memory {
  std::mutex lock;
  Blocks device;
  Blocks host;
  size_t used[fake::MOST_DEVICES] = {};
};

// It is never destroyed: frees come until the process ends.
Memory& memory() {
  static auto* made = new Memory;
  return *made;
}

// Whether a stream can read and write this memory while the host goes on.
bool reachable(const void* pointer, size_t bytes) {
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  return all.device.holding(pointer) != all.device.none() ||
         all.host.holding(pointer, bytes) != all.host.none();
}

cudaError_t refuse_pageable(fake::Stream* stream, const char* what) {
  stream->capture->invalid = true;
  fake::say("a copy of pageable memory was captured");
  return fake::fail(cudaErrorStreamCaptureUnsupported, what);
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t raw, bool wait) {
  if (!bytes) return cudaSuccess;
  const bool reads = reachable(from, bytes), writes = reachable(to, bytes);
  fake::Stream* stream = fake::stream_of(raw);
  if (stream->capture && !(reads && writes)) return refuse_pageable(stream, "cudaMemcpyAsync");
  cudaError_t error;
  if (reads) {
    auto run = [=] {
      if (!reachable(from, bytes) || (writes && !reachable(to, bytes))) {
        fake::say("a copy came to memory that is not page-locked any more");
        fake::lose(stream->device, cudaErrorIllegalAddress);
        return;
      }
      std::memmove(to, from, bytes);
    };
    error = fake::enqueue(raw, run, "memcpy");
  } else {
    const auto* first = static_cast<const char*>(from);
    auto kept = std::make_shared<std::vector<char>>(first, first + bytes);
    error = fake::enqueue(raw, [=] { std::memcpy(to, kept->data(), bytes); }, "memcpy");
  }
  if (error) return error;
  if (!stream->capture && (wait || !writes)) stream->drain();
  return cudaSuccess;
}

}  // namespace

// ---- of a device

API cudaError_t cudaMalloc(void** answer, size_t bytes) {
  FAIL_IF_CAPTURED();
  *answer = nullptr;
  if (!bytes) return cudaSuccess;
  const size_t rounded = (bytes + GRANULE - 1) / GRANULE * GRANULE;
  const int device = fake::current_device();
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  if (all.used[device] + rounded > fake::MEMORY) FAIL(cudaErrorMemoryAllocation);
  void* made = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) FAIL(cudaErrorMemoryAllocation);
  if (rounded <= LARGEST_FILLED) std::memset(made, NAN_BYTE, rounded);
  all.used[device] += rounded;
  all.device.add(made, {rounded, Kind::DEVICE, device});
  *answer = made;
  return cudaSuccess;
}

API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  FAIL_IF_CAPTURED();
  fake::drain_all();
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  auto place = all.device.at(pointer);
  if (place == all.device.none()) FAIL(cudaErrorInvalidValue);
  all.used[place->second.device] -= place->second.bytes;
  munmap(pointer, place->second.bytes);
  all.device.remove(place);
  return cudaSuccess;
}

API cudaError_t cudaMallocAsync(void** answer, size_t bytes, cudaStream_t) {
  return cudaMalloc(answer, bytes);
}

API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

API cudaError_t cudaMallocManaged(void**, size_t, unsigned) { FAIL(cudaErrorNotSupported); }

API cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  *total = fake::MEMORY;
  *left = fake::MEMORY - all.used[fake::current_device()];
  return cudaSuccess;
}

// ---- of the host, page-locked

API cudaError_t cudaHostAlloc(void** answer, size_t bytes, unsigned) {
  FAIL_IF_CAPTURED();
  void* made = nullptr;
  if (posix_memalign(&made, PAGE, bytes ? bytes : 1)) FAIL(cudaErrorMemoryAllocation);
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  all.host.add(made, {bytes, Kind::ALLOCATED, fake::current_device()});
  *answer = made;
  return cudaSuccess;
}

API cudaError_t cudaMallocHost(void** answer, size_t bytes) {
  return cudaHostAlloc(answer, bytes, 0);
}

API cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  FAIL_IF_CAPTURED();
  fake::drain_all();
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  auto place = all.host.at(pointer);
  if (place == all.host.none() || place->second.kind != Kind::ALLOCATED) {
    FAIL(cudaErrorInvalidValue);
  }
  all.host.remove(place);
  std::free(pointer);
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  FAIL_IF_CAPTURED();
  if (!pointer || !bytes) FAIL(cudaErrorInvalidValue);
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  if (all.host.overlaps(pointer, bytes)) FAIL(cudaErrorHostMemoryAlreadyRegistered);
  all.host.add(pointer, {bytes, Kind::REGISTERED, fake::current_device()});
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* pointer) {
  FAIL_IF_CAPTURED();
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  auto place = all.host.at(pointer);
  if (place == all.host.none() || place->second.kind != Kind::REGISTERED) {
    FAIL(cudaErrorHostMemoryNotRegistered);
  }
  all.host.remove(place);
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* told, const void* pointer) {
  std::memset(told, 0, sizeof *told);
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  auto* address = const_cast<void*>(pointer);
  if (auto place = all.device.holding(pointer); place != all.device.none()) {
    told->type = cudaMemoryTypeDevice;
    told->device = place->second.device;
    told->devicePointer = address;
  } else if (all.host.holding(pointer) != all.host.none()) {
    told->type = cudaMemoryTypeHost;
    told->device = fake::current_device();
    told->devicePointer = told->hostPointer = address;
  } else {
    told->type = cudaMemoryTypeUnregistered;
    told->device = -1;
  }
  return cudaSuccess;
}

// ---- copies

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                cudaStream_t stream) {
  return copy(to, from, bytes, stream, false);
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  FAIL_IF_CAPTURED();
  return copy(to, from, bytes, nullptr, true);
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                    cudaStream_t stream) {
  return copy(to, from, bytes, stream, false);
}

API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind,
                                  cudaStream_t stream) {
  if (!width || !height) return cudaSuccess;
  const bool pageable = !reachable(from, from_pitch * (height - 1) + width) ||
                        !reachable(to, to_pitch * (height - 1) + width);
  fake::Stream* played = fake::stream_of(stream);
  if (played->capture && pageable) return refuse_pageable(played, __func__);
  auto rows = [=] {
    for (size_t row = 0; row < height; ++row) {
      std::memmove(static_cast<char*>(to) + row * to_pitch,
                   static_cast<const char*>(from) + row * from_pitch, width);
    }
  };
  const cudaError_t error = fake::enqueue(stream, rows, "memcpy2d");
  if (!error && pageable) played->drain();
  return error;
}

API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fake::enqueue(stream, [=] { std::memset(to, value, bytes); }, "memset");
}

API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

// ---- pools, which are empty

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = reinterpret_cast<cudaMemPool_t>(1);
  return cudaSuccess;
}

API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  std::memset(value, 0, sizeof(uint64_t));
  return cudaSuccess;
}

API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}

API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

API cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  std::memset(value, 0, sizeof(uint64_t));
  return cudaSuccess;
}

API cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) {
  return cudaSuccess;
}

API cudaError_t cudaDeviceGraphMemTrim(int) { return cudaSuccess; }
