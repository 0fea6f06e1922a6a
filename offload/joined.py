"""Fused updates that follow each other as one call of torch's kernel, which takes lists.

    adam([p1], [g1], ...)  adam([p2], [g2], ...)   ->   adam([p1, p2], [g1, g2], ...)

The kernel treats every tensor of a list by itself, so the bits are the same; what is spared is what
torch's wrapper does around it, at every call again. Each of them allocates what it would by itself:
a few bytes that are free again before the next one's. (The step counters, which the kernel
advances, are copied into tensors that stay.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.kernels import Call, Value
from offload.tensor_updates import TensorUpdate
from offload.updates import Update

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Updates of one group of an optimizer."""

    updates: Sequence[Update]
    tensors: Sequence[Tensors]
    """Of each: the parameter, the gradient, the states."""
    counters: Sequence[torch.Tensor]
    """Copies; none where the optimizer has no counter."""

    def __call__(self) -> None:
        first = self.updates[0]
        if not first.numbers()["fused"]:  # somebody changed it since
            for update, tensors in zip(self.updates, self.tensors, strict=True):
                update(*tensors)
            return
        for copy, update in zip(self.counters, self.updates, strict=False):
            counter = update.counter()
            # From elsewhere as a number: copying would wait for the device.
            copy.copy_(counter) if counter.device == copy.device else copy.fill_(counter.item())
        first.together(self.tensors, self.counters)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedRows:
    """The same of updates that read their numbers from memory."""

    updates: Sequence[TensorUpdate]
    tensors: Sequence[Tensors]

    def __call__(self) -> None:
        self.updates[0].together(self.tensors, self.updates)


def joined(
    calls: Sequence[Call], view: Callable[[Value], torch.Tensor]
) -> list[tuple[Call, Joined | JoinedRows]]:
    """The calls of a task, by group, with one that allocates what all of it do; none where they are
    not all fused updates."""
    groups: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls:
        update = call.op.update if isinstance(call.op, TensorUpdate) else call.op
        if not isinstance(update, Update) or not _settings(update)["fused"]:
            return []
        key = (type(call.op), *update.alike, id(update.kept), call.args[0].dtype)
        groups.setdefault(key, []).append(call)
    return [(_allocating(found), _one(found, view)) for found in groups.values()]


def _allocating(calls: Sequence[Call]) -> Call:
    each = [call.allocations for call in calls]
    return replace(calls[0], allocations=None if None in each else sum(each, ()))


def _one(calls: Sequence[Call], view: Callable[[Value], torch.Tensor]) -> Joined | JoinedRows:
    tensors = [tuple(map(view, call.args)) for call in calls]
    rows = [call.op for call in calls if isinstance(call.op, TensorUpdate)]
    if rows:
        return JoinedRows(rows, tensors)
    updates = [call.op for call in calls if isinstance(call.op, Update)]
    counts = updates[0].counts
    counters = [_counter(u, own[0]) for u, own in zip(updates, tensors, strict=True) if counts]
    return Joined(updates, tensors, counters)


def _counter(update: Update, p: torch.Tensor) -> torch.Tensor:
    """Not `counter`, for the same reason as below. The kernel reads it where the parameter is."""
    return update.optimizer.state[update.parameter]["step"].to(p.device, copy=True)


def _settings(update: Update) -> dict[str, Any]:
    """Not `numbers`: those of the step that it belongs to need not be there yet."""
    return update.optimizer.param_groups[update.group]
