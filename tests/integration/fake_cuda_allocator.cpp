// Plays PyTorch's caching allocator for CUDA with the machine's own memory: no driver is needed. What
// an op on the device would ask of the allocator, the tests ask through the functions at the end.

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdlib>

namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;

int64_t living = 0;
int64_t streams = 0; // how many memory blocks of ours were noted for a stream
std::vector<CUDAAllocator*> before;

void give_back(void* address) {
  living -= address != nullptr;
  std::free(address);
}

struct Fake final : CUDAAllocator {
  void* raw_alloc(size_t nbytes) override {
    living += 1;
    return std::malloc(nbytes);
  }
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t) override { return raw_alloc(nbytes); }
  void raw_delete(void* address) override { give_back(address); }
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = raw_alloc(nbytes);
    return {address, address, &give_back, c10::Device(c10::DeviceType::CUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void recordStream(const c10::DataPtr& given, c10::cuda::CUDAStream) override {
    streams += given.get_deleter() == &give_back; // as the native one looks at it
  }
  std::string name() override { return "native"; }

  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
  void init(int) override {}
  double getMemoryFraction(DeviceIndex) override { return 0.25; }
  void setMemoryFraction(double, DeviceIndex) override {}
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex) override { return {}; }
  void enable(bool) override {}
  bool isEnabled() const override { return true; }
  void cacheInfo(DeviceIndex, size_t*) override {}
  void* getBaseAllocation(void* address, size_t*) override { return address; }
  SnapshotInfo snapshot(MempoolId_t, bool) override { return {}; }
  void beginAllocateToPool(DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) override {}
  void endAllocateToPool(DeviceIndex, MempoolId_t) override {}
  void releasePool(DeviceIndex, MempoolId_t) override {}
  ShareableHandle shareIpcHandle(void*) override { return {0, ""}; }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { return nullptr; }
  void recordHistory(
      bool, CreateContextFn, size_t, RecordContext, bool, const std::vector<std::string>&) override {}
  void attachOutOfMemoryObserver(OutOfMemoryObserver) override {}
  virtual void attachOomRejectionObserver(
      std::function<void(int64_t, size_t, size_t, size_t)>) {}
  void attachAllocatorTraceTracker(AllocatorTraceTracker) override {}
  void enablePeerAccess(DeviceIndex, DeviceIndex) override {}
  cudaError_t memcpyAsync(
      void*, int, const void*, int, size_t, cudaStream_t, bool) override { return cudaSuccess; }
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex, MempoolId_t) override {
    return nullptr;
  }
  CheckpointDelta setCheckpointPoolState(
      DeviceIndex, std::shared_ptr<AllocatorState>) override { return {}; }
};

Fake& fake() {
  static Fake& made = *new Fake;
  return made;
}

} // namespace

extern "C" {

void fake_begin() {
  before.push_back(allocator.exchange(&fake()));
}
void fake_end() {
  allocator.store(before.back());
  c10::SetAllocator(c10::DeviceType::CUDA, before.back(), 255);
  before.pop_back();
}
int64_t fake_living() {
  return living;
}
int64_t fake_streams() {
  return streams;
}

// What ops ask for.
void* op_tensor(uint64_t nbytes) {
  return new c10::DataPtr(get()->allocate(nbytes));
}
void* op_address(void* tensor) {
  return static_cast<c10::DataPtr*>(tensor)->get();
}
int op_device(void* tensor) {
  return static_cast<c10::DataPtr*>(tensor)->device().index();
}
void op_stream(void* tensor) {
  const c10::Stream stream(
      c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, 0));
  recordStream(*static_cast<c10::DataPtr*>(tensor), c10::cuda::CUDAStream(stream));
}
void op_drop(void* tensor) {
  delete static_cast<c10::DataPtr*>(tensor);
}
void* op_raw(uint64_t nbytes) {
  return raw_alloc(nbytes);
}
void* op_raw_on_stream(uint64_t nbytes) {
  return raw_alloc_with_stream(nbytes, nullptr);
}
void op_raw_drop(void* address) {
  raw_delete(address);
}
double op_fraction() {
  return getMemoryFraction(0);
}

} // extern "C"
