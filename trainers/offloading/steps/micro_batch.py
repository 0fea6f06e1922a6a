"""A micro-batch of a fit, and the graph that was captured for such micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer

from offload import TaskGraph
from offload.optimizer.fixed_settings import fixed_settings
from offload.program.assumptions import Number
from offload.torch_seams import hook_keys
from offload.tracing.fixed_at_capture import torch_settings
from offload.tracing.training import Clip, Parameter
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


def situation_of(module: L.LightningModule, optimizer: Optimizer, kind: str) -> tuple[Any, ...]:
    """Return what a graph depends on besides its batch and the Python values that its step reads.
    `kind`: the type of the step's device."""
    trainer = module.trainer
    return (
        trainer.accumulate_grad_batches,
        trainer.gradient_clip_val,
        trainer.gradient_clip_algorithm,
        torch_settings(),
        torch.is_autocast_enabled(kind),
        tuple([p.requires_grad for p in module.parameters()]),
        hook_keys(module.parameters()),
        fixed_settings(optimizer),
    )


def clip_of(trainer: L.Trainer) -> Clip | None:
    """Return how the Trainer clips gradients; None if it does not."""
    limit = trainer.gradient_clip_val
    if not limit or limit <= 0:
        return None
    by = trainer.gradient_clip_algorithm
    return Clip(float(limit), "norm" if by is None else str(by.value))


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


def micro_batches_left(trainer: L.Trainer) -> float:
    """Return how many calls of `training_step` this fit has left, as far as the trainer knows;
    infinite where it has no end."""
    whole = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
    return max(0, whole - trainer.fit_loop.epoch_loop.total_batch_idx)
