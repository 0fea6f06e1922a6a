"""Runs fused updates that follow each other as one call of torch's kernel, which takes lists.

    adam([p1], [g1], ...)  adam([p2], [g2], ...)   ->   adam([p1, p2], [g1, g2], ...)

The kernel treats every tensor of a list on its own, so the bits are the same, and torch's wrapper
runs once instead of once a tensor. The joint call allocates what the single calls would: a few
bytes each. (The step counters, which the kernel advances, are copied into tensors that stay.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.optimizer.tensor_updates import TensorUpdate
from offload.optimizer.updates import Update
from offload.program.kernels import Call, Value

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class JointUpdate:
    """Updates of one parameter group of an optimizer, run in one call."""

    updates: Sequence[Update]
    tensors: Sequence[Tensors]
    """Of each update: the parameter, the gradient, the states."""
    counters: Sequence[torch.Tensor]
    """A copy of each update's step counter; empty for an optimizer without counters."""

    def __call__(self) -> None:
        first = self.updates[0]
        if not first.numbers()["fused"]:  # somebody has turned it off since
            for update, tensors in zip(self.updates, self.tensors, strict=True):
                update(*tensors)
            return
        for copy, update in zip(self.counters, self.updates, strict=False):
            counter = update.counter()
            # A counter on another device is read as a number: a copy would wait for the device.
            copy.copy_(counter) if counter.device == copy.device else copy.fill_(counter.item())
        first.together(self.tensors, self.counters)


@dataclass(frozen=True, slots=True, eq=False)
class JointRows:
    """Updates of one group that read their numbers from memory, run in one call."""

    updates: Sequence[TensorUpdate]
    tensors: Sequence[Tensors]

    def __call__(self) -> None:
        self.updates[0].together(self.tensors, self.updates)


def joined(
    calls: Sequence[Call], view: Callable[[Value], torch.Tensor]
) -> list[tuple[Call, JointUpdate | JointRows]]:
    """Join the calls of a task, group by group; nothing unless all of them are fused updates.

    Each result has a call that stands for the group's allocations, and the joint update itself."""
    groups: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls:
        update = call.op.update if isinstance(call.op, TensorUpdate) else call.op
        if not isinstance(update, Update) or not update.numbers()["fused"]:
            return []
        key = (type(call.op), *update.alike, call.args[0].dtype)
        groups.setdefault(key, []).append(call)
    return [(_allocating(found), _one(found, view)) for found in groups.values()]


def _allocating(calls: Sequence[Call]) -> Call:
    each = [call.allocations for call in calls]
    return replace(calls[0], allocations=None if None in each else sum(each, ()))


def _one(calls: Sequence[Call], view: Callable[[Value], torch.Tensor]) -> JointUpdate | JointRows:
    tensors = [tuple(map(view, call.args)) for call in calls]
    rows = [call.op for call in calls if isinstance(call.op, TensorUpdate)]
    if rows:
        return JointRows(rows, tensors)
    updates = [call.op for call in calls if isinstance(call.op, Update)]
    counts = updates[0].counts
    # The kernel reads each copy on the parameter's device.
    counters = [
        update.counter().to(own[0].device, copy=True)
        for update, own in zip(updates, tensors, strict=True)
        if counts
    ]
    return JointUpdate(updates, tensors, counters)
