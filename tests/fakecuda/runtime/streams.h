// Streams: work that is done in order, each piece of it a function.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

namespace fake {

using Work = std::function<void()>;

struct Capture;

// Priorities are 0 and below: the least number is the greatest priority.
inline constexpr int GREATEST_PRIORITY = -5;

class Stream {
 public:
  Stream(int device, int priority, unsigned seed)
      : device(device), priority(priority), random_(seed) {}

  // Does the work, or has the stream's thread do it after what it was given before. `signal` tells
  // others that the stream has come so far.
  void push(Work work, Work signal = nullptr);
  bool idle();
  // Returns when all work is done that was pushed before.
  void drain();

  const int device;
  const int priority;
  // The capture that the stream takes part in, and the nodes of it that its next node follows.
  std::shared_ptr<Capture> capture;
  std::vector<int> tail;

 private:
  [[noreturn]] void work_forever();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::pair<Work, Work>> waiting_;
  bool busy_ = false;
  bool started_ = false;
  std::mt19937 random_;
};

// What a handle means: 0, 1 and 2 are the default stream of the thread's device.
Stream* stream_of(cudaStream_t handle);

// Pushes the work, or adds a node to the capture that the stream takes part in.
cudaError_t enqueue(cudaStream_t handle, Work work, const char* name);

void drain_all();
void drain_device(int device);

}  // namespace fake
