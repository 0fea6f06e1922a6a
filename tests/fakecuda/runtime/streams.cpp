// Streams: in order, each piece of work is done where it is issued, and every stream is always
// idle. Where FAKE_CUDA_ASYNC is set, each stream has a thread, which waits a random time now and
// then.
//
// The default stream is one more stream: that it waits for all blocking ones is not played.
#include "streams.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <tuple>

#include "captures.h"
#include "devices.h"
#include "errors.h"
#include "loss.h"
#include "settings.h"

namespace fake {

namespace {

constexpr uintptr_t LAST_DEFAULT_HANDLE = 2;
constexpr unsigned SEED_OF_DEFAULTS = 77;
// One piece of work in so many is delayed.
constexpr unsigned DELAYED = 3;

// Streams are never destroyed: who uses one after its end finds it drained.
struct Streams {
  std::mutex lock;
  std::vector<Stream*> all;
  Stream* defaults[MOST_DEVICES] = {};
};

Streams& streams() {
  static auto* made = new Streams;
  return *made;
}

Stream* new_stream(int priority) {
  auto& known = streams();
  std::lock_guard<std::mutex> held(known.lock);
  auto* made = new Stream(current_device(), priority, known.all.size() + 1);
  known.all.push_back(made);
  return made;
}

}  // namespace

void Stream::push(Work work, Work signal) {
  if (!ASYNC) {
    work();
    if (signal) signal();
    return;
  }
  {
    std::lock_guard<std::mutex> held(lock_);
    if (!started_) {
      started_ = true;
      std::thread([this] { work_forever(); }).detach();
    }
    waiting_.emplace_back(std::move(work), std::move(signal));
  }
  changed_.notify_all();
}

void Stream::work_forever() {
  for (;;) {
    Work work, signal;
    {
      std::unique_lock<std::mutex> held(lock_);
      changed_.wait(held, [&] { return !waiting_.empty(); });
      std::tie(work, signal) = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
    }
    if (JITTER && random_() % DELAYED == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % JITTER));
    }
    work();
    work = nullptr;  // what it kept goes before the stream is idle
    {
      std::lock_guard<std::mutex> held(lock_);
      busy_ = false;
      if (signal) signal();  // who hears it and asks finds the stream idle
    }
    changed_.notify_all();
  }
}

bool Stream::idle() {
  std::lock_guard<std::mutex> held(lock_);
  return waiting_.empty() && !busy_;
}

void Stream::drain() {
  std::unique_lock<std::mutex> held(lock_);
  changed_.wait(held, [&] { return waiting_.empty() && !busy_; });
}

Stream* stream_of(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) > LAST_DEFAULT_HANDLE) {
    return reinterpret_cast<Stream*>(handle);
  }
  auto& known = streams();
  std::lock_guard<std::mutex> held(known.lock);
  Stream*& one = known.defaults[current_device()];
  if (!one) {
    one = new Stream(current_device(), 0, SEED_OF_DEFAULTS);
    known.all.push_back(one);
  }
  return one;
}

cudaError_t enqueue(cudaStream_t handle, Work work, const char* name) {
  Stream* stream = stream_of(handle);
  FAIL_IF_LOST(stream->device);
  if (stream->capture) return add_node(stream, std::move(work), name);
  stream->push(std::move(work));
  return cudaSuccess;
}

void drain_all() {
  for (int device = 0; device < DEVICES; ++device) drain_device(device);
}

void drain_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> held(streams().lock);
    all = streams().all;
  }
  for (auto* stream : all) {
    if (stream->device == device) stream->drain();
  }
}

}  // namespace fake

using fake::stream_of;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* answer, unsigned, int priority) {
  FAIL_IF_CAPTURED();
  *answer = reinterpret_cast<cudaStream_t>(
      fake::new_stream(std::clamp(priority, fake::GREATEST_PRIORITY, 0)));
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* answer, unsigned flags) {
  return cudaStreamCreateWithPriority(answer, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* answer) {
  return cudaStreamCreateWithPriority(answer, 0, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stream_of(stream)->drain();
  return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* answer) {
  *answer = stream_of(stream)->priority;
  return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  auto* stream = stream_of(handle);
  FAIL_IF_LOST(stream->device);
  if (stream->capture) {
    stream->capture->invalid = true;
    FAIL(cudaErrorStreamCaptureUnsupported);
  }
  stream->drain();
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  auto* stream = stream_of(handle);
  FAIL_IF_LOST(stream->device);
  if (stream->capture) {
    stream->capture->invalid = true;
    FAIL(cudaErrorStreamCaptureUnsupported);
  }
  return stream->idle() ? cudaSuccess : fake::not_ready();
}

API cudaError_t cudaDeviceSynchronize() {
  FAIL_IF_LOST(fake::current_device());
  if (fake::spoil_captures_on(fake::current_device())) {
    FAIL(cudaErrorStreamCaptureUnsupported);
  }
  fake::drain_device(fake::current_device());
  return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data,
                                      unsigned) {
  return fake::enqueue(stream, [=] { call(stream, cudaSuccess, data); }, "callback");
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  return fake::enqueue(stream, [=] { call(data); }, "host function");
}
