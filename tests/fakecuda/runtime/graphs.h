// Graphs: pieces of work, each of which follows some of those before it.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fake {

struct Node {
  std::function<void()> work;
  // The numbers of the nodes that come before it.
  std::vector<int> follows;
  std::string name;
};

struct Graph {
  std::vector<Node> nodes;
};

// A new handle, which cudaGraphDestroy deletes.
cudaGraph_t handle_of(std::shared_ptr<Graph> graph);

// The node that makes its stream wait, which torch.cuda._sleep launches.
inline constexpr char SPIN[] = "spin";

}  // namespace fake
