// libcuda.so.1, the driver: it lets torch's libraries be loaded and the runtime's contexts be asked
// for. cuInit says that there is no device: what talks to the driver itself (NVML, NVRTC, Triton,
// a ballast of memory) is not played.
#include <cstdint>
#include <cstring>

namespace {
constexpr int SUCCESS = 0;
constexpr int NO_DEVICE = 100;
void* const CONTEXT = reinterpret_cast<void*>(1);
}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int cuInit(unsigned) { return NO_DEVICE; }

API int cuCtxGetCurrent(void** context) {
  *context = CONTEXT;
  return SUCCESS;
}

API int cuCtxSetCurrent(void*) { return SUCCESS; }

API int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = CONTEXT;
  return SUCCESS;
}

API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return SUCCESS;
}

API int cuDeviceGet(int* device, int number) {
  *device = number;
  return SUCCESS;
}

API int cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return SUCCESS;
}

API int cuPointerGetAttribute(void* value, int, unsigned long long) {
  std::memcpy(value, &CONTEXT, sizeof CONTEXT);
  return SUCCESS;
}

API int cuGetErrorString(int, const char** text) {
  *text = "an error of the fake driver";
  return SUCCESS;
}
