// An allocator over PyTorch's caching one for CUDA: see placed.h. Everything but allocations is handed
// on, so whoever asks it for numbers, pools, streams or snapshots gets the native one's answers.
//
// It is installed by a store to an atomic pointer: no driver is needed, and CUDA may be in use already.
// Memory that the native one gave out keeps the native one's deleter, so it can be freed either way.
//
// cuBLAS must have its workspaces before a call is served: the first product of a thread on a stream
// allocates one, which would otherwise get a planned address and keep it.
//
// PyTorch 2.11 and later: `hand_on` leaves out what a version does not have yet.

#include <c10/cuda/CUDACachingAllocator.h>

#include "placed.h"

namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::cuda::CUDAStream;

CUDAAllocator* native = nullptr;

// `native->call`, if this version of PyTorch has it; otherwise nobody calls it.
#define hand_on(Result, call)                 \
  [&]<class Native>(Native* to) -> Result {     \
    if constexpr (requires { to->call; }) {     \
      return to->call;                          \
    } else {                                    \
      return Result();                          \
    }                                           \
  }(native)

struct PlacedAllocator final : CUDAAllocator {
  // Allocations.
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = take_planned(nbytes);
    if (!address) {
      return pass(nbytes);
    }
    const auto device = static_cast<DeviceIndex>(here.device);
    return {address, address, &leave, c10::Device(c10::DeviceType::CUDA, device)};
  }
  void* raw_alloc(size_t nbytes) override {
    void* address = take_planned(nbytes);
    return address ? address : note(native->raw_alloc(nbytes), nbytes);
  }
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override {
    void* address = take_planned(nbytes);
    return address ? address : note(native->raw_alloc_with_stream(nbytes, stream), nbytes);
  }
  void raw_delete(void* address) override {
    if (note_free(address)) {
      native->raw_delete(address);
    }
  }
  // Callers compare it with a storage's deleter, so it is the one that `allocate` gives out now.
  c10::DeleterFnPtr raw_deleter() const override {
    return here.serving || shared.watchers.load() ? &release : native->raw_deleter();
  }

  // Memory that was given while someone watched has another deleter than the native one expects.
  void recordStream(const c10::DataPtr& given, CUDAStream stream) override {
    if (given.get_deleter() != &release) {
      return native->recordStream(given, stream);
    }
    c10::DataPtr same(given.get(), given.get(), native->raw_deleter(), given.device());
    native->recordStream(same, stream);
    same.release_context();
  }
  void recordStream(const c10::DataPtr& given, c10::Stream stream) override {
    recordStream(given, CUDAStream(stream));
  }

  // Everything else.
  bool is_simple_data_ptr(const c10::DataPtr& given) const override {
    return native->is_simple_data_ptr(given);
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    native->copy_data(to, from, nbytes);
  }
  bool initialized() override {
    return native->initialized();
  }
  void emptyCache(MempoolId_t pool) override {
    native->emptyCache(pool);
  }
  DeviceStats getDeviceStats(DeviceIndex device) override {
    return native->getDeviceStats(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    native->resetAccumulatedStats(device);
  }
  void resetPeakStats(DeviceIndex device) override {
    native->resetPeakStats(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return native->getMemoryInfo(device);
  }
  void init(int devices) override {
    native->init(devices);
  }
  double getMemoryFraction(DeviceIndex device) override {
    return native->getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    native->setMemoryFraction(fraction, device);
  }
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return native->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override {
    native->enable(value);
  }
  bool isEnabled() const override {
    return native->isEnabled();
  }
  void cacheInfo(DeviceIndex device, size_t* largest) override {
    native->cacheInfo(device, largest);
  }
  void* getBaseAllocation(void* address, size_t* nbytes) override {
    return native->getBaseAllocation(address, nbytes);
  }
  SnapshotInfo snapshot(MempoolId_t pool, bool traces) override {
    return native->snapshot(pool, traces);
  }
  void beginAllocateToPool(
      DeviceIndex device,
      MempoolId_t pool,
      std::function<bool(cudaStream_t)> filter) override {
    native->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    native->endAllocateToPool(device, pool);
  }
  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    native->releasePool(device, pool);
  }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return native->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(
      DeviceIndex device,
      MempoolId_t pool,
      std::shared_ptr<CUDAAllocator> allocator) override {
    native->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override {
    native->setUseOnOOM(device, pool, use);
  }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    native->setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(
      DeviceIndex device,
      MempoolId_t pool,
      const std::unordered_set<void*>& expected) override {
    return native->checkPoolLiveAllocations(device, pool, expected);
  }
  ShareableHandle shareIpcHandle(void* address) override {
    return native->shareIpcHandle(address);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return native->getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override {
    return native->isHistoryEnabled();
  }
  void recordHistory(
      bool enabled,
      CreateContextFn context,
      size_t entries,
      RecordContext when,
      bool clear,
      const std::vector<std::string>& skip) override {
    native->recordHistory(enabled, context, entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override {
    native->recordAnnotation(pairs);
  }
  void pushCompileContext(std::string& context) override {
    native->pushCompileContext(context);
  }
  void popCompileContext() override {
    native->popCompileContext();
  }
  void setUserMetadata(const std::string& metadata) override {
    native->setUserMetadata(metadata);
  }
  std::string getUserMetadata() override {
    return native->getUserMetadata();
  }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    native->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    native->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex to) override {
    native->enablePeerAccess(device, to);
  }
  cudaError_t memcpyAsync(
      void* to,
      int to_device,
      const void* from,
      int from_device,
      size_t nbytes,
      cudaStream_t stream,
      bool peers) override {
    return native->memcpyAsync(to, to_device, from, from_device, nbytes, stream, peers);
  }
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool)
      override {
    return native->getCheckpointState(device, pool);
  }
  CheckpointDelta setCheckpointPoolState(
      DeviceIndex device,
      std::shared_ptr<AllocatorState> state) override {
    return native->setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override {
    return native->name();
  }

  // Of versions after 2.11: in an older one these override nothing.
  virtual void markCaptureBegin(DeviceIndex device) {
    hand_on(void, markCaptureBegin(device));
  }
  virtual void markCaptureEnd(DeviceIndex device) {
    hand_on(void, markCaptureEnd(device));
  }
  virtual std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* address) {
    return hand_on(std::shared_ptr<c10::GatheredContext>, getContextForPointer(address));
  }
  virtual bool supportsUserMetadata() {
    return hand_on(bool, supportsUserMetadata());
  }
  virtual void annotateMemory(const void* address, const std::string& metadata) {
    hand_on(void, annotateMemory(address, metadata));
  }
  virtual void attachOomRejectionObserver(
      std::function<void(int64_t, size_t, size_t, size_t)> observer) {
    hand_on(void, attachOomRejectionObserver(std::move(observer)));
  }
  virtual c10::DataPtr allocateWithAddress(size_t nbytes, void* address) {
    return hand_on(c10::DataPtr, allocateWithAddress(nbytes, address));
  }
};

PlacedAllocator& mine() {
  static PlacedAllocator& made = *new PlacedAllocator; // never destroyed: others point at it
  return made;
}

} // namespace

extern "C" {

// 0: ours is installed. 1: the present one is not PyTorch's caching allocator, and cannot be wrapped.
int placed_install() {
  CUDAAllocator* found = allocator.load();
  if (found == &mine()) {
    return 0;
  }
  if (!found || found->name() != "native") {
    return 1;
  }
  if (!native) {
    mind_forks();
  }
  base = native = found;
  allocator.store(&mine());
  c10::SetAllocator(c10::DeviceType::CUDA, &mine(), 255);
  return 0;
}

} // extern "C"
