"""The optimizer's numbers in memory of the device, so that a captured graph reads those of today.

    host    lr, counter of today --one copy--> [ lr -lr step .. | lr -lr step .. | ]  a row each
    graph   update(p, g, m, v) reads its row          replayed, it reads what lies there then

A captured graph keeps the numbers of the day of its capture. `refresh()` writes those that change
from step to step, computed on the host in torch's own float64 arithmetic, before every replay.
All others (betas, weight decay, momentum, flags) are baked in: `baked()` says which they are now,
and whoever replays compares.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import SGD

from offload.kernels import Call
from offload.taskgraph import TaskGraph
from offload.tensor_updates import COLUMNS, Row, TensorUpdate
from offload.updates import Update

BAKED = (
    "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "amsgrad",
    "fused", "foreach", "decoupled_weight_decay",
)  # fmt: skip
COUNTER = 8
"""Bytes of a step counter, at most."""
Source = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """A row of a fused update whose counter may lie on the device: then it is copied there."""

    update: Update
    step: torch.Tensor


class Scalars:
    """Of all updates of a graph that run on its device."""

    def __init__(self, updates: Sequence[Update], device: torch.device) -> None:
        self._updates = {_source(update): update for update in updates}
        self._rows = {source: number for number, source in enumerate(self._updates)}
        shape = (len(self._rows), len(COLUMNS))
        self._wide = torch.zeros(shape, dtype=torch.float64, device=device)
        self._single = torch.zeros(shape, dtype=torch.float32, device=device)
        self._groups = {_group(update): update for update in self._updates.values()}
        self._counted = [
            _Counted(update, self._row(update, self._single).step)
            for update in self._updates.values()
            if _fused(update) and type(update.optimizer) is not SGD
        ]

    @classmethod
    def of(cls, graph: TaskGraph, device: torch.device) -> "Scalars | None":
        """None where no update runs on the device."""
        found = [
            call.op
            for task in graph.tasks
            if task.engine.startswith("compute")
            for call in getattr(task.kernel, "calls", ())
            if isinstance(call.op, Update)
        ]
        return cls(found, device) if found else None

    def bound(self, call: Call) -> Call:
        """The call of an update reads its row; any other one is as it was."""
        update = call.op
        if not isinstance(update, Update) or _source(update) not in self._rows:
            return call
        # Of the counter it makes no copy.
        kept = call.allocations and tuple(a for a in call.allocations if a.nbytes > COUNTER)
        op = TensorUpdate(
            update, self._row(update, self._wide), self._row(update, self._single), _fused(update)
        )
        return replace(call, op=op, allocations=kept)

    def _row(self, update: Update, bank: torch.Tensor) -> Row:
        return Row(*bank[self._rows[_source(update)]].unbind())

    def refresh(self) -> None:
        """The numbers of the step that begins, on the caller's current stream."""
        known: dict[tuple[Hashable, float], tuple[float, ...]] = {}
        device = self._wide.device
        rows = [_numbers(update, known) for update in self._updates.values()]
        # Pinned memory is not used again before a copy out of it is done: torch sees to that.
        fresh = torch.tensor(rows, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._wide.copy_(fresh, non_blocking=True)
        self._single.copy_(self._wide)
        live, steps = [], []
        for counted in self._counted:
            if (counter := counted.update.counter()).device.type != "cpu":
                live.append(counter)
                steps.append(counted.step)
        if steps:
            torch._foreach_copy_(steps, live)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]

    def baked(self) -> Hashable:
        """What a graph that is captured now keeps."""
        return tuple(
            tuple(_plain(update.numbers().get(name)) for name in BAKED)
            for update in self._groups.values()
        )

    def notes(self) -> list[str]:
        """Where a replayed update's last bits may be others than eager's."""
        if self._wide.device.type == "cpu" or not any(map(_fused, self._updates.values())):
            return []
        return [
            "cudagraph: the last bits differ from eager's in fused updates: torch's kernel takes a"
            " learning rate in memory as float32, and one of Python's as float64"
        ]


def _numbers(
    update: Update, known: dict[tuple[Hashable, float], tuple[float, ...]]
) -> tuple[float, ...]:
    """A row, by the formulas of torch/optim/adam.py."""
    now = update.numbers()
    lr = float(now["lr"])
    if type(update.optimizer) is SGD:
        return lr, -lr, 0.0, 1.0, -lr, 1.0
    counter = update.counter()
    if _fused(update):
        return lr, -lr, counter.item() + 1 if counter.device.type == "cpu" else 0.0, 1.0, -lr, 1.0
    step = counter.item() + 1
    key = _group(update), step
    if key not in known:
        beta1, beta2 = map(float, now["betas"])
        size = lr / (1 - beta1**step)
        known[key] = (
            lr, -lr, step, 1 - lr * float(now["weight_decay"]), -size, (1 - beta2**step) ** 0.5
        )  # fmt: skip
    return known[key]


def _fused(update: Update) -> bool:
    """Not of `numbers`: those of the step that it belongs to need not be there yet."""
    return bool(update.optimizer.param_groups[update.group]["fused"])


def _source(update: Update) -> Source:
    return (*_group(update), id(update.parameter))


def _group(update: Update) -> Source:
    return id(update.optimizer), update.group, id(update.kept)


def _plain(value: Any) -> Hashable:
    """Comparable, whatever the user gave."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value
