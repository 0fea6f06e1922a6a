// Events: each recording makes a new mark on its stream, so who waits for an earlier one goes on
// waiting for that one. An event that was recorded in a capture stands for nodes of its graph, and
// a stream that waits for it joins the capture.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "captures.h"
#include "devices.h"
#include "errors.h"
#include "loss.h"
#include "streams.h"

namespace {

constexpr double MILLISECONDS = 1e3;

double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

// A place in a stream's work. It is set when the stream comes to it.
class Mark {
 public:
  explicit Mark(int device) : device(device) {}

  void set() {
    {
      std::lock_guard<std::mutex> held(lock_);
      at_ = now();
      done_ = true;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> held(lock_);
    changed_.wait(held, [&] { return done_.load(); });
  }
  bool done() const { return done_; }
  double at() const { return at_; }

  const int device;

 private:
  std::atomic<bool> done_{false};
  double at_ = 0;
  std::mutex lock_;
  std::condition_variable changed_;
};

struct Event {
  bool timed;
  // Of the last recording: a mark on a stream, or nodes of a capture.
  std::shared_ptr<Mark> mark;
  std::shared_ptr<fake::Capture> capture;
  std::vector<int> nodes;
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

int device_of(const Event& event) {
  return event.mark ? event.mark->device : fake::current_device();
}

// Joins `stream` to the capture in which the event was recorded, after the event's nodes.
cudaError_t join(fake::Stream* stream, const Event& event) {
  auto capture = event.capture;
  if (!fake::running(capture)) return fake::fail(cudaErrorCapturedEvent, "cudaStreamWaitEvent");
  if (capture->invalid) {
    return fake::fail(cudaErrorStreamCaptureInvalidated, "cudaStreamWaitEvent");
  }
  if (stream->capture && stream->capture != capture) {
    stream->capture->invalid = capture->invalid = true;
    return fake::fail(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
  }
  if (!stream->capture) {
    stream->capture = capture;
    stream->tail.clear();
    capture->streams.insert(stream);
  }
  for (int node : event.nodes) {
    auto& tail = stream->tail;
    if (std::find(tail.begin(), tail.end(), node) == tail.end()) tail.push_back(node);
  }
  return cudaSuccess;
}

}  // namespace

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* answer, unsigned flags) {
  *answer = reinterpret_cast<cudaEvent_t>(new Event{!(flags & cudaEventDisableTiming)});
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* answer) { return cudaEventCreateWithFlags(answer, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  auto* event = event_of(handle);
  auto* stream = fake::stream_of(on);
  FAIL_IF_LOST(stream->device);
  if (stream->capture) {
    if (stream->capture->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
    event->mark = nullptr;
    event->capture = stream->capture;
    event->nodes = stream->tail;
    return cudaSuccess;
  }
  auto mark = std::make_shared<Mark>(stream->device);
  event->mark = mark;
  event->capture = nullptr;
  stream->push([] {}, [mark] { mark->set(); });
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  auto* event = event_of(handle);
  FAIL_IF_LOST(device_of(*event));
  if (event->capture) {
    event->capture->invalid = true;
    FAIL(cudaErrorCapturedEvent);
  }
  FAIL_IF_CAPTURED();
  return !event->mark || event->mark->done() ? cudaSuccess : fake::not_ready();
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto* event = event_of(handle);
  FAIL_IF_LOST(device_of(*event));
  if (event->capture) {
    event->capture->invalid = true;
    FAIL(cudaErrorCapturedEvent);
  }
  FAIL_IF_CAPTURED();
  if (auto mark = event->mark) mark->wait();
  return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  auto *start = event_of(from), *end = event_of(to);
  if (!start->timed || !end->timed || !start->mark || !end->mark ||
      start->mark->device != end->mark->device) {
    FAIL(cudaErrorInvalidResourceHandle);
  }
  if (!start->mark->done() || !end->mark->done()) FAIL(cudaErrorNotReady);
  *milliseconds = static_cast<float>((end->mark->at() - start->mark->at()) * MILLISECONDS);
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t what, unsigned) {
  auto* event = event_of(what);
  auto* stream = fake::stream_of(handle);
  FAIL_IF_LOST(stream->device);
  if (event->capture) return join(stream, *event);
  if (!event->mark) return cudaSuccess;
  if (stream->capture) {
    stream->capture->invalid = true;
    FAIL(cudaErrorStreamCaptureIsolation);
  }
  stream->push([mark = event->mark] { mark->wait(); });
  return cudaSuccess;
}
