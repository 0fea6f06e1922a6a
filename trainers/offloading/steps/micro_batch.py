"""A micro-batch of a fit, and the graph that was captured for such micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from offload import TaskGraph
from offload.program.assumptions import Number
from offload.tracing.training import Parameter
from trainers.offloading.steps.graph_validity import GraphValidity
from trainers.offloading.tracing.closure import StepRecipe


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The arguments of one call of `training_step`, and its place in the optimizer step."""

    batch: Any
    batch_idx: int | None
    first: bool
    """Whether the optimizer step begins with this micro-batch."""
    last: bool
    """Whether the optimizer steps after this micro-batch."""

    @property
    def part(self) -> str:
        """Name the part of an optimizer step that this micro-batch is."""
        if self.first:
            return "whole step" if self.last else "first micro-batch"
        return "last micro-batch" if self.last else "middle micro-batch"


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """The graph of a micro-batch. This object is also its key in the runner."""

    validity: GraphValidity
    holds: frozenset[Parameter]
    """The parameters that have a sum of gradients after this graph."""
    last: bool
    zeroed: tuple[Any, ...]
    """The owners whose `on_before_zero_grad` is traced in this graph."""
    outside: Mapping[str, torch.Tensor]
    """The tensors of others that it changes: a callback's averages of the weights, for example."""
    graph: TaskGraph
    about: tuple[str, str]
    """The shapes of its batch, and the part of an optimizer step that it is."""

    @property
    def recipe(self) -> StepRecipe:
        return self.validity.recipe

    @property
    def assumed(self) -> Sequence[Number]:
        """What the graph assumes of the values that the step asks for."""
        return self.graph.program.assumed


def outside(
    graph: TaskGraph, module: L.LightningModule, sums: Mapping[Parameter, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the tensors that the step changes and that are neither the module's nor `sums`."""
    changed = {b for task in graph.tasks for b in task.writes if graph.buffers[b].persistent}
    own = {id(t) for t in (*module.parameters(), *module.buffers(), *sums.values())}
    found: dict[str, torch.Tensor] = {}
    for name in {graph.buffers[b].tensor for b in changed}:
        source = graph.program.tensors[name]
        for tensor in source if isinstance(source, tuple) else (source,):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in own:
                found[name] = tensor
    return found
