// Captures: what streams are given becomes nodes of a graph and is not done.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <set>
#include <thread>

#include "errors.h"
#include "graphs.h"
#include "streams.h"

namespace fake {

struct Capture {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  Stream* origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  unsigned long long id;
  // All streams that take part.
  std::set<Stream*> streams;
  // Something was done that a capture forbids: its end returns an error.
  bool invalid = false;
};

// Whether the capture has not ended.
bool running(const std::shared_ptr<Capture>& capture);

// Adds a node that follows the stream's last ones.
cudaError_t add_node(Stream* stream, Work work, const char* name);

// Makes captures invalid whose mode forbids that this thread makes an unsafe call now, and returns
// whether there was one.
bool spoil_captures();

// Makes captures invalid that began on this device, and returns whether there was one.
bool spoil_captures_on(int device);

}  // namespace fake

// For functions that CUDA calls unsafe: cudaMalloc, for one, may wait for the device.
#define FAIL_IF_CAPTURED() \
  if (fake::spoil_captures()) FAIL(cudaErrorStreamCaptureUnsupported)
