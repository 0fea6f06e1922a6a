// Graphs: a launch is one piece of work on its stream, which runs the nodes one at a time, in an
// order that the edges allow. That is the order of simulated time, in which a spin lasts a thousand
// times as long as any other node; or, where FAKE_CUDA_SHUFFLE is set, a random one.
//
// Updates of a graph, conditional nodes and allocations within one are not played.
#include "graphs.h"

#include <algorithm>
#include <queue>
#include <random>

#include "errors.h"
#include "settings.h"
#include "streams.h"

namespace fake {

namespace {

constexpr double SPIN_TIME = 1000;
constexpr double NODE_TIME = 1;

std::shared_ptr<Graph>& graph_of(cudaGraph_t handle) {
  return *reinterpret_cast<std::shared_ptr<Graph>*>(handle);
}

// Nodes whose predecessors have run.
class Ready {
 public:
  explicit Ready(const Graph& graph)
      : graph_(graph), left_(graph.nodes.size()), followers_(graph.nodes.size()) {
    for (size_t node = 0; node < left_.size(); ++node) {
      left_[node] = graph.nodes[node].follows.size();
      for (int before : graph.nodes[node].follows) followers_[before].push_back(node);
    }
  }
  // Calls `made_ready` for each node that nothing precedes.
  template <class MadeReady>
  void begin(MadeReady made_ready) {
    for (size_t node = 0; node < left_.size(); ++node) {
      if (!graph_.nodes[node].follows.size()) made_ready(node);
    }
  }
  // Runs the node, and calls `made_ready` for each one that may run now.
  template <class MadeReady>
  void run(int node, MadeReady made_ready) {
    graph_.nodes[node].work();
    for (int next : followers_[node]) {
      if (--left_[next] == 0) made_ready(next);
    }
  }
  const std::vector<int>& followers(int node) const { return followers_[node]; }

 private:
  const Graph& graph_;
  std::vector<size_t> left_;
  std::vector<std::vector<int>> followers_;
};

void run_shuffled(const Graph& graph) {
  static std::mt19937 random;
  Ready ready(graph);
  std::vector<int> may_run;
  auto add = [&](int node) { may_run.push_back(node); };
  ready.begin(add);
  while (!may_run.empty()) {
    std::swap(may_run[random() % may_run.size()], may_run.back());
    const int node = may_run.back();
    may_run.pop_back();
    ready.run(node, add);
  }
}

void run_by_time(const Graph& graph) {
  std::vector<double> starts(graph.nodes.size(), 0);
  auto later = [&](int one, int other) {
    return starts[one] != starts[other] ? starts[one] > starts[other] : one > other;
  };
  std::priority_queue<int, std::vector<int>, decltype(later)> may_run(later);
  Ready ready(graph);
  auto add = [&](int node) { may_run.push(node); };
  ready.begin(add);
  while (!may_run.empty()) {
    const int node = may_run.top();
    may_run.pop();
    const double end = starts[node] + (graph.nodes[node].name == SPIN ? SPIN_TIME : NODE_TIME);
    for (int next : ready.followers(node)) starts[next] = std::max(starts[next], end);
    ready.run(node, add);
  }
}

}  // namespace

cudaGraph_t handle_of(std::shared_ptr<Graph> graph) {
  return reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(std::move(graph)));
}

}  // namespace fake

using fake::Graph;

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete &fake::graph_of(graph);
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = fake::graph_of(graph)->nodes.size();
  return cudaSuccess;
}

// Only whether a graph is empty is asked, so no node's edges are told.
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*,
                                             size_t* count) {
  *count = 0;
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* answer, cudaGraph_t graph,
                                              unsigned long long) {
  *answer = reinterpret_cast<cudaGraphExec_t>(fake::handle_of(fake::graph_of(graph)));
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* answer, cudaGraph_t graph,
                                     unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(answer, graph, flags);
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  return cudaGraphDestroy(reinterpret_cast<cudaGraph_t>(handle));
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  auto graph = fake::graph_of(reinterpret_cast<cudaGraph_t>(handle));
  auto run = [graph] { fake::SHUFFLE ? fake::run_shuffled(*graph) : fake::run_by_time(*graph); };
  return fake::enqueue(stream, run, "graph");
}

API cudaError_t cudaUserObjectCreate(cudaUserObject_t* answer, void* object, cudaHostFn_t, unsigned,
                                     unsigned) {
  *answer = reinterpret_cast<cudaUserObject_t>(object);
  return cudaSuccess;
}

API cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }

API cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaSuccess;
}
