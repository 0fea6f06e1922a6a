"""One model in one process: eager and every plan of it, a step of each in turn.

    round   eager  resident  60 %  40 %  smallest  memcpy of as many bytes      in another order
            each with the same seed and the same batch          each with a model of its own,
                                                                and a thread: a session has one

Nothing is shared between the rows; their losses, and at the end all that they trained, must be
eager's to the bit. The copies of a plan are done once more by themselves (`memcpy`), between the
same addresses of two regions laid out like its arenas, twice, and the quicker time counts: what
they cost at least, on this machine, at this moment.
"""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from ctypes import memmove
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness.process import time_call
from benchmarks.offloading.live_steps import SETTLED, LiveSteps, training_step
from benchmarks.offloading.nets import Batch, Case, cases
from offload import BudgetTooSmall, Plan, TaskGraph, plan
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, Place
from offload.graph.taskgraph import HOST
from offload.memory.cpu_shim import available
from offload.planning.wanted import peak_bytes

MIB = 1 << 20
BUDGETS = (("resident", None), ("60 %", 0.6), ("40 %", 0.4), ("smallest", 0.0))


@dataclass(frozen=True, slots=True)
class ModelJob:
    """What a child is asked to measure."""

    case: str
    threads: int
    """0: torch's own choice."""
    placement: str
    rounds: int
    smoke: bool


@dataclass(slots=True)
class Row:
    """Eager, or steps by a plan, in a thread of their own."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., torch.Tensor]
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    first_s: float = 0.0
    """CPU seconds of the steps that are planned."""
    seen: dict[str, list[float]] = field(
        default_factory=lambda: {"cpu": [], "wall": [], "memcpy": []}
    )
    wrong_losses: int = 0
    wrong_tensors: int = 0

    @property
    def plan(self) -> Plan | None:
        """Of a step that was taken."""
        return self.step.plan if isinstance(self.step, LiveSteps) else None

    @property
    def moves(self) -> bool:
        """Whether it has a budget: else only the batch comes in."""
        return self.name != "resident"

    def take(self, batch: Batch) -> torch.Tensor:
        """The loss of a step."""
        return self.thread.submit(self.step, *batch).result()

    def begin(self) -> None:
        if isinstance(self.step, LiveSteps):
            self.thread.submit(self.step.__enter__).result()

    def end(self) -> None:
        with self.thread:
            if isinstance(self.step, LiveSteps):
                self.thread.submit(self.step.__exit__, None, None, None).result()


def run_model(job: ModelJob) -> dict[str, Any]:
    """In a process of its own."""
    if job.threads:
        torch.set_num_threads(job.threads)
    available()
    case = cases(job.smoke)[job.case]
    torch.manual_seed(0)
    model = case.model()
    rows = [_row(case, copy.deepcopy(model), name, share, job) for name, share in BUDGETS]
    rows.insert(0, _row(case, model, "eager", None, None))
    with ExitStack() as open_:
        for row in rows:
            open_.callback(row.end)
            row.begin()
        _rounds(case, rows, job.rounds)
        facts = {row.name: _facts(row.plan) for row in rows if row.plan is not None}
    for row in rows[1:]:
        row.wrong_tensors = _different(rows[0], row)
    return {
        "case": job.case, "setting": case.setting, "threads": torch.get_num_threads(),
        "placement": job.placement,
        "rows": [{"name": row.name, "wrong_losses": row.wrong_losses,
                  "wrong_tensors": row.wrong_tensors, "first_s": row.first_s,
                  **facts.get(row.name, {}), **row.seen} for row in rows],
    }  # fmt: skip


def _row(
    case: Case, module: nn.Module, name: str, share: float | None, job: ModelJob | None
) -> Row:
    """`job`: None for eager."""
    optimizer = case.optimizer(module)
    step = training_step(module, case.loss, optimizer)
    if job is not None:
        made = partial(planned, share=share, placement=job.placement)
        step = LiveSteps(step, made, module, optimizer)
    return Row(name, module, optimizer, step)


def planned(graph: TaskGraph, share: float | None, **more: Any) -> Plan:
    """Within so much of the peak; None: no limit; 0: the smallest budget that holds it."""
    if share is None:
        return plan(graph, **more)
    budget = max(1, int(peak_bytes(graph, 0) * share))
    while True:
        try:
            return plan(graph, budget, **more)
        except BudgetTooSmall as refused:
            if refused.needed <= budget:
                raise
            budget = refused.needed


def _facts(made: Plan) -> dict[str, Any]:
    nodes, tasks = made.memgraph.nodes, made.graph.tasks
    return {
        "placement": made.placement,
        "peak_mib": made.peak_bytes / MIB,
        "live_mib": max(made.source.live_bytes()) / MIB,
        "device_mib": made.device_bytes / MIB,
        "host_mib": made.host_bytes / MIB,
        "tasks": len(tasks),
        "recomputed": sum(bool(task.recomputes) for task in tasks),
        "offloads": sum(node.kind == OFFLOAD for node in nodes),
        "reloads": sum(node.kind == RELOAD for node in nodes),
        "edges": sum(len(node.deps) for node in nodes),
        "out_mib": sum(node.nbytes for node in nodes if node.kind == OFFLOAD) / MIB,
        "in_mib": sum(node.nbytes for node in nodes if node.kind == RELOAD) / MIB,
        "predicted_s": made.predicted_seconds,
        "bound_s": made.bound.seconds,
        "binds": made.bound.lane,
        "tried": list(made.found.tried),
    }


def _rounds(case: Case, rows: Sequence[Row], rounds: int) -> None:
    """As many more before them, in which steps are planned."""
    memcpy, copies = _Memcpy([]), dict[str, list[tuple[Place, Place]]]()
    for number in range(-SETTLED, rounds):
        if number == 0:
            moving = {row.name: row.plan for row in rows if row.plan is not None and row.moves}
            memcpy = _Memcpy([made.memgraph.arenas for made in moving.values()])
            copies = {name: _copies(made) for name, made in moving.items()}
        torch.manual_seed(1000 + number)
        batch = case.batch()
        losses: dict[str, torch.Tensor] = {}
        for row in random.Random(number).sample(rows, len(rows)):
            torch.manual_seed(100 + number)
            cpu, wall, losses[row.name] = time_call(partial(row.take, batch))
            if number < 0:
                row.first_s += cpu
                continue
            again = partial(memcpy.run, copies.get(row.name, ()))
            copied = min(time_call(again)[0] for _ in range(2))
            for key, took in (("cpu", cpu), ("wall", wall), ("memcpy", copied)):
                row.seen[key].append(took)
        for row in rows:
            row.wrong_losses += not torch.equal(losses["eager"], losses[row.name])


def _copies(made: Plan) -> list[tuple[Place, Place]]:
    """Of one step: from, to."""
    return [
        (node.accesses[0].place, node.accesses[1].place)
        for node in made.memgraph.nodes
        if node.kind != TASK
    ]


class _Memcpy:
    """The copies of any of the plans, in memory that nobody else uses."""

    def __init__(self, arenas: Sequence[Mapping[int, int]]) -> None:
        sizes = {a: max((one.get(a, 0) for one in arenas), default=0) for a in (0, HOST)}
        # Filled: memory that was never touched has no pages.
        self._regions = {
            a: torch.empty(nbytes, dtype=torch.uint8).fill_(1) for a, nbytes in sizes.items()
        }

    def run(self, copies: Sequence[tuple[Place, Place]]) -> None:
        begins = {a: region.data_ptr() for a, region in self._regions.items()}
        for source, target in copies:
            memmove(
                begins[target.arena] + target.offset,
                begins[source.arena] + source.offset,
                source.nbytes,
            )


def _different(eager: Row, row: Row) -> int:
    """Parameters, buffers and tensors of the optimizer that are not eager's to the bit."""
    pairs = list(
        zip(eager.module.state_dict().values(), row.module.state_dict().values(), strict=True)
    )
    for mine, theirs in zip(eager.module.parameters(), row.module.parameters(), strict=True):
        own, other = eager.optimizer.state[mine], row.optimizer.state[theirs]
        pairs += [(value, other[key]) for key, value in own.items()]
    return sum(not torch.equal(a, b) for a, b in pairs)
