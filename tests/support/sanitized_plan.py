"""Four steps of a small plan whose tensors come and go, by the engine that is asked for.

    compute-sanitizer --tool memcheck python tests/support/sanitized_plan.py cuda:0 cudagraph

Prints the last loss.
"""

import sys

import torch
from support.live_training import LiveTraining, training_graph
from torch import nn
from torch.nn import functional

import offload

STEPS = 4


def main(device: str, engine: str) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        *(nn.Linear(128, 128) for _ in range(6)),
        nn.Dropout(0.1),
        nn.Linear(128, 10),
    )
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    x, y = torch.randn(8, 3, 9, 9).to(device), torch.randint(0, 10, (8,)).to(device)
    graph = training_graph(net, functional.cross_entropy, optimizer, x, y)
    whole = offload.plan(graph)
    plan = offload.plan(graph, whole.peak_bytes // 2 + whole.reserve)
    assert any(node.kind != "task" for node in plan.memgraph.nodes), "nothing comes and goes"
    with LiveTraining(net, functional.cross_entropy, optimizer, plan, engine=engine) as step:
        losses = [step(x, y)[0] for _ in range(STEPS)]
    return float(losses[-1])


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
