// Captures and their rules: a stream joins by waiting for an event of a capture (events.cpp), every
// stream that joined must lead back to the first one, unsafe calls spoil a capture by its mode, and
// only the thread that began one ends it.
#include "captures.h"

#include <vector>

#include "loss.h"

namespace fake {

namespace {

struct Captures {
  std::mutex lock;
  std::set<std::shared_ptr<Capture>> running;
  unsigned long long begun = 0;
};

Captures& captures() {
  static auto* made = new Captures;
  return *made;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// The nodes, and all that they follow.
std::set<int> before(const Graph& graph, std::vector<int> left) {
  std::set<int> seen;
  while (!left.empty()) {
    const int node = left.back();
    left.pop_back();
    if (!seen.insert(node).second) continue;
    const auto& follows = graph.nodes[node].follows;
    left.insert(left.end(), follows.begin(), follows.end());
  }
  return seen;
}

// Whether the last nodes of every stream lead to the last ones of the first stream.
bool joined(const Capture& capture) {
  const auto reached = before(*capture.graph, capture.origin->tail);
  for (const auto* stream : capture.streams) {
    for (int node : stream->tail) {
      if (!reached.count(node)) return false;
    }
  }
  return true;
}

}  // namespace

bool running(const std::shared_ptr<Capture>& capture) {
  std::lock_guard<std::mutex> held(captures().lock);
  return captures().running.count(capture);
}

cudaError_t add_node(Stream* stream, Work work, const char* name) {
  auto& capture = *stream->capture;
  if (capture.invalid) return fail(cudaErrorStreamCaptureInvalidated, name);
  auto& nodes = capture.graph->nodes;
  nodes.push_back({std::move(work), stream->tail, name});
  stream->tail = {static_cast<int>(nodes.size()) - 1};
  return cudaSuccess;
}

bool spoil_captures() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  std::lock_guard<std::mutex> held(captures().lock);
  bool spoiled = false;
  for (const auto& capture : captures().running) {
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool forbids = mine ? capture->mode != cudaStreamCaptureModeRelaxed
                              : thread_mode == cudaStreamCaptureModeGlobal &&
                                    capture->mode == cudaStreamCaptureModeGlobal;
    if (forbids) capture->invalid = spoiled = true;
  }
  return spoiled;
}

bool spoil_captures_on(int device) {
  std::lock_guard<std::mutex> held(captures().lock);
  bool spoiled = false;
  for (const auto& capture : captures().running) {
    if (capture->origin->device == device) capture->invalid = spoiled = true;
  }
  return spoiled;
}

}  // namespace fake

using fake::captures;
using fake::stream_of;

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  if (!handle || handle == cudaStreamLegacy) FAIL(cudaErrorStreamCaptureUnsupported);
  auto* stream = stream_of(handle);
  FAIL_IF_LOST(stream->device);
  if (stream->capture) FAIL(cudaErrorIllegalState);
  auto capture = std::make_shared<fake::Capture>();
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->streams.insert(stream);
  stream->capture = capture;
  stream->tail.clear();
  std::lock_guard<std::mutex> held(captures().lock);
  capture->id = ++captures().begun;
  captures().running.insert(capture);
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* answer) {
  *answer = nullptr;
  auto* stream = stream_of(handle);
  auto capture = stream->capture;
  if (!capture) FAIL(cudaErrorIllegalState);
  if (capture->origin != stream) FAIL(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    FAIL(cudaErrorStreamCaptureWrongThread);
  }
  const bool whole = fake::joined(*capture);
  for (auto* one : capture->streams) {
    one->capture = nullptr;
    one->tail.clear();
  }
  {
    std::lock_guard<std::mutex> held(captures().lock);
    captures().running.erase(capture);
  }
  if (capture->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
  if (!whole) FAIL(cudaErrorStreamCaptureUnjoined);
  *answer = fake::handle_of(capture->graph);
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* answer) {
  const auto& capture = stream_of(handle)->capture;
  *answer = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

// A node's handle is its number, from 1 on. The graph and the nodes belong to the thread and stay
// until it asks again.
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  static thread_local std::shared_ptr<fake::Graph> told;
  static thread_local std::vector<cudaGraphNode_t> last;
  const auto* stream = stream_of(handle);
  const auto& capture = stream->capture;
  last.clear();
  if (capture) {
    told = capture->graph;
    for (int node : stream->tail) last.push_back(reinterpret_cast<cudaGraphNode_t>(node + 1L));
  }
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? reinterpret_cast<cudaGraph_t>(&told) : nullptr;
  if (nodes) *nodes = last.data();
  if (edges) *edges = nullptr;
  if (count) *count = last.size();
  return cudaStreamIsCapturing(handle, status);
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, fake::thread_mode);
  return cudaSuccess;
}

API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*,
                                                    const cudaGraphEdgeData*, size_t, unsigned) {
  FAIL(cudaErrorNotSupported);
}
