"""The graph of one lane, and the graph of several lanes in turn.

    lane      F1 F2 B2 B1                    weights come in once a lane
    group     F1 f1 F2 f2 B2 b2 B1 b1        once a group; each gradient in the order of the lanes

The lanes of a group know nothing of each other but the sums. Each draws from a generator of its
own, and begins with the buffers that the group begins with; what the first one leaves there stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import offload
from offload import TaskGraph
from offload.torch_seams import pytree
from offload.tracing.training import Parameter
from trainers.offloading.steps.graph_validity import GraphValidity
from trainers.offloading.tracing.closure import StepRecipe


@dataclass(frozen=True, slots=True, eq=False)
class LaneGraph:
    """The graph of a lane. This object is also its key in the runner."""

    validity: GraphValidity
    graph: TaskGraph
    touched: frozenset[Parameter]
    """The parameters that get a gradient."""

    @property
    def recipe(self) -> StepRecipe:
        return self.validity.recipe


@dataclass(frozen=True, slots=True, eq=False)
class LaneGroup:
    """Several lanes of one graph. This object is also its key in the runner."""

    lane: LaneGraph
    graph: TaskGraph
    draws: tuple[torch.Generator, ...]
    """One for each lane. Whoever runs the group seeds them before."""

    @classmethod
    def of(cls, lane: LaneGraph, size: int) -> "LaneGroup":
        draws = tuple(torch.Generator(lane.graph.program.device) for _ in range(size))
        graph = offload.in_turn([lane.graph] * size, draws, same_buffers=True)
        return cls(lane, graph, draws)

    @property
    def size(self) -> int:
        return len(self.draws)

    def outputs_by_lane(self, outputs: Sequence[Any]) -> list[list[Any]]:
        """Return the outputs of each lane."""
        count = len(pytree.tree_leaves(self.lane.graph.program.outputs))
        return [list(outputs[n * count : (n + 1) * count]) for n in range(self.size)]
