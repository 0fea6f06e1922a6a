// Kernels: a compiled one cannot run without a GPU, so its launch prints its name and fails. The
// ops of aten never come here (../ops/). One kernel is played: the spin of torch.cuda._sleep.
#include <cxxabi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "errors.h"
#include "graphs.h"
#include "settings.h"
#include "streams.h"

namespace {

constexpr long CYCLES_A_NANOSECOND = 2;
constexpr long LONGEST_SPIN = 3000000;  // nanoseconds
constexpr int BLOCKS_A_MULTIPROCESSOR = 2;
constexpr int THREADS_A_BLOCK = 1024;
constexpr size_t SHARED_MEMORY = 48 << 10;
constexpr int ARCHITECTURE = 90;

struct Kernels {
  std::mutex lock;
  std::unordered_map<const void*, std::string> names;
};

Kernels& kernels() {
  static auto* made = new Kernels;
  return *made;
}

std::string name_of(const void* kernel) {
  std::string mangled;
  {
    std::lock_guard<std::mutex> held(kernels().lock);
    auto place = kernels().names.find(kernel);
    if (place == kernels().names.end()) return "a kernel without a name";
    mangled = place->second;
  }
  int status;
  char* name = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string answer = name ? name : mangled;
  std::free(name);
  return answer;
}

void spin(long cycles) {
  if (!fake::ASYNC) return;
  const long wanted = cycles / CYCLES_A_NANOSECOND;
  std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(wanted, LONGEST_SPIN)));
}

cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  const std::string name = name_of(kernel);
  if (name.find("spin_kernel") != std::string::npos) {
    const long cycles = *static_cast<int64_t*>(arguments[0]);
    return fake::enqueue(stream, [cycles] { spin(cycles); }, fake::SPIN);
  }
  fake::say("a compiled kernel was launched: %.160s", name.c_str());
  if (fake::ABORT) std::abort();
  return fake::fail(cudaErrorNoKernelImageForDevice, "cudaLaunchKernel");
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

// ---- what compiled code calls where a library is loaded

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}

API void __cudaUnregisterFatBinary(void**) {}

API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, uint3*,
                                uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> held(kernels().lock);
  kernels().names[kernel] = name;
}

API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}

// ---- launches

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                         cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* answer, const void* kernel) {
  *answer = static_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                   cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t,
                                 cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void** arguments,
                                            size_t, cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel,
                                    void** arguments) {
  return launch(kernel, arguments, how->stream);
}

// ---- what is asked of a kernel

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* told, const void*) {
  std::memset(told, 0, sizeof *told);
  told->maxThreadsPerBlock = THREADS_A_BLOCK;
  told->binaryVersion = told->ptxVersion = ARCHITECTURE;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
  return cudaSuccess;
}

API cudaError_t cudaGetFuncBySymbol(cudaFunction_t* answer, const void* kernel) {
  *answer = static_cast<cudaFunction_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* answer, const void*, int,
                                                              size_t) {
  *answer = BLOCKS_A_MULTIPROCESSOR;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* answer, const void*,
                                                                       int, size_t, unsigned) {
  *answer = BLOCKS_A_MULTIPROCESSOR;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t* answer, const void*, int, int) {
  *answer = SHARED_MEMORY;
  return cudaSuccess;
}

API cudaError_t cudaGetSymbolAddress(void** answer, const void*) {
  *answer = nullptr;
  FAIL(cudaErrorInvalidSymbol);
}

API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
