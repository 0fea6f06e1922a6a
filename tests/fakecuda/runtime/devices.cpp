// Devices: how many there are, which one a thread uses, and what they say of themselves. They are
// H200s without memory of each other: peers cannot reach one another, and there is no memory pool.
#include "devices.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "errors.h"
#include "settings.h"
#include "streams.h"

namespace {

constexpr int CUDA_VERSION_PLAYED = 13000;
constexpr int MAJOR = 9;
constexpr int MULTIPROCESSORS = 132;
constexpr int WARP = 32;
constexpr int THREADS_A_BLOCK = 1024;
constexpr int THREADS_A_MULTIPROCESSOR = 2048;
constexpr int REGISTERS = 65536;
constexpr int SHARED_A_BLOCK = 48 << 10;
constexpr int SHARED_A_BLOCK_OPT_IN = 227 << 10;
constexpr int SHARED_A_MULTIPROCESSOR = 228 << 10;
constexpr int L2_BYTES = 50 << 20;
constexpr int LARGEST_GRID = 2147483647;
constexpr int LARGEST_GRID_YZ = 65535;
constexpr int COPY_ENGINES = 3;
constexpr int BUS_BITS = 6144;
constexpr int TEXTURE_ALIGNMENT = 512;

thread_local int device = 0;

}  // namespace

namespace fake {
int current_device() { return device; }
}  // namespace fake

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = std::min(fake::DEVICES, fake::MOST_DEVICES);
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* answer) {
  *answer = device;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int wanted) {
  if (wanted < 0 || wanted >= fake::DEVICES) FAIL(cudaErrorInvalidDevice);
  device = wanted;
  return cudaSuccess;
}

API cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }

API cudaError_t cudaDeviceReset() { return cudaSuccess; }

API cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION_PLAYED;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA_VERSION_PLAYED;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* told, int which) {
  std::memset(told, 0, sizeof *told);
  std::snprintf(told->name, sizeof told->name, "Fake H200");
  told->totalGlobalMem = fake::MEMORY;
  told->major = MAJOR;
  told->multiProcessorCount = MULTIPROCESSORS;
  told->warpSize = WARP;
  told->maxThreadsPerBlock = THREADS_A_BLOCK;
  told->maxThreadsPerMultiProcessor = THREADS_A_MULTIPROCESSOR;
  told->sharedMemPerBlock = SHARED_A_BLOCK;
  told->sharedMemPerBlockOptin = SHARED_A_BLOCK_OPT_IN;
  told->sharedMemPerMultiprocessor = SHARED_A_MULTIPROCESSOR;
  told->regsPerBlock = REGISTERS;
  told->regsPerMultiprocessor = REGISTERS;
  told->l2CacheSize = L2_BYTES;
  told->maxThreadsDim[0] = told->maxThreadsDim[1] = THREADS_A_BLOCK;
  told->maxThreadsDim[2] = 64;
  told->maxGridSize[0] = LARGEST_GRID;
  told->maxGridSize[1] = told->maxGridSize[2] = LARGEST_GRID_YZ;
  told->textureAlignment = TEXTURE_ALIGNMENT;
  told->asyncEngineCount = COPY_ENGINES;
  told->unifiedAddressing = 1;
  told->concurrentKernels = 1;
  told->memoryBusWidth = BUS_BITS;
  told->pciBusID = 1 + which;
  told->uuid.bytes[0] = static_cast<char>(1 + which);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = MAJOR;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = MULTIPROCESSORS;
      break;
    case cudaDevAttrWarpSize:
      *value = WARP;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = THREADS_A_BLOCK;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = THREADS_A_MULTIPROCESSOR;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = SHARED_A_BLOCK;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = SHARED_A_BLOCK_OPT_IN;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* told, int size, int which) {
  std::snprintf(told, size, "0000:%02x:00.0", which + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = fake::GREATEST_PRIORITY;
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* answer, int, int) {
  *answer = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { FAIL(cudaErrorPeerAccessUnsupported); }

API cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }

API cudaError_t cudaCtxResetPersistingL2Cache() { return cudaSuccess; }

// Torch asks for functions of the driver by their names, and does without those that are not there.
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  if (found) *found = cudaDriverEntryPointSymbolNotFound;
  if (fake::VERBOSE) fake::say("no function %s of the driver", name);
  return cudaSuccess;
}

API cudaError_t cudaProfilerStart() { return cudaSuccess; }

API cudaError_t cudaProfilerStop() { return cudaSuccess; }
