"""Keeps the optimizer's numbers in device memory, so that a captured graph reads the present ones.

    host    lr and counters now --one copy--> [ lr -lr step .. | lr -lr step .. | ]  a row an update
    graph   update(p, g, m, v) reads its row          every replay reads what lies there then

A captured graph keeps the Python numbers of its capture. So before every replay `refresh()` writes
those that change from step to step, computed on the host in torch's own float64 arithmetic. All
others (betas, weight decay, momentum, flags) are fixed by the capture. `baked()` returns their
present values, and whoever replays compares them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import SGD

from offload.graph.taskgraph import TaskGraph
from offload.optimizer.tensor_updates import COLUMNS, Row, TensorUpdate
from offload.optimizer.updates import Update
from offload.program.kernels import Call
from offload.torch_seams import foreach_add_, foreach_copy_

BAKED = (
    "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "amsgrad",
    "fused", "foreach", "decoupled_weight_decay",
)  # fmt: skip
COUNTER = 8
"""The most bytes that a step counter takes."""
Source = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """The row of a fused update. If its counter lies on the device, it is copied from there."""

    update: Update
    step: torch.Tensor


class Scalars:
    """The numbers of all updates of a graph that run on its device."""

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
        """The numbers of a graph's updates; None if no update runs on the device."""
        found = [
            call.op
            for task in graph.tasks
            if task.lane.startswith("compute")
            for call in getattr(task.kernel, "calls", ())
            if isinstance(call.op, Update)
        ]
        return cls(found, device) if found else None

    def bound(self, call: Call) -> Call:
        """The call, if it is an update, with its row to read from; any other call unchanged."""
        update = call.op
        if not isinstance(update, Update) or _source(update) not in self._rows:
            return call
        # The bound update makes no copy of the counter.
        kept = call.allocations and tuple(a for a in call.allocations if a.nbytes > COUNTER)
        op = TensorUpdate(
            update, self._row(update, self._wide), self._row(update, self._single), _fused(update)
        )
        return replace(call, op=op, allocations=kept)

    def _row(self, update: Update, bank: torch.Tensor) -> Row:
        return Row(*bank[self._rows[_source(update)]].unbind())

    def refresh(self) -> None:
        """Write the numbers of the step that begins, on the caller's current stream."""
        known: dict[tuple[Hashable, float], tuple[float, ...]] = {}
        device = self._wide.device
        rows = [_numbers(update, known) for update in self._updates.values()]
        # Torch does not reuse pinned memory before the copies out of it are done.
        fresh = torch.tensor(rows, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._wide.copy_(fresh, non_blocking=True)
        self._single.copy_(self._wide)
        live, steps = [], []
        for counted in self._counted:
            if (counter := counted.update.counter()).device.type != "cpu":
                live.append(counter)
                steps.append(counted.step)
        if steps:
            foreach_copy_(steps, live)
            foreach_add_(steps, 1)

    def baked(self) -> Hashable:
        """The numbers that a graph captured now would keep."""
        return tuple(
            tuple(_plain(update.numbers().get(name)) for name in BAKED)
            for update in self._groups.values()
        )

    def notes(self) -> list[str]:
        """Say where a replayed update may differ from eager in its last bits."""
        if self._wide.device.type == "cpu" or not any(map(_fused, self._updates.values())):
            return []
        return [
            "cudagraph: fused updates differ from eager in the last bits, because torch's kernel"
            " reads a learning rate from memory as float32 and takes a Python number as float64"
        ]


def _numbers(
    update: Update, known: dict[tuple[Hashable, float], tuple[float, ...]]
) -> tuple[float, ...]:
    """The numbers of an update's row, by the formulas of torch/optim/adam.py."""
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
    return bool(update.numbers()["fused"])


def _source(update: Update) -> Source:
    return (*_group(update), id(update.parameter), update.ahead)


def _group(update: Update) -> Source:
    return id(update.optimizer), update.group


def _plain(value: Any) -> Hashable:
    """A value that can be compared, whatever type the user gave."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value
