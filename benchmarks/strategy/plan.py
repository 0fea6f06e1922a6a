"""Seconds until the first step of GPT-2-small is planned, and the predicted peak against the real.

    arena  |a5 a5 a5 a5 a5 a5 a5|  filled before anything lies in it
           |#### ### ## ##### a5|  after some steps: lines of 64 bytes that changed; the last one's
                          ^high    end is the high-water mark

The real peak owes nothing to the planner: bytes of the device's arena up to the last that was ever
written, and the most that kernels took from the system's allocator outside of it, which the shim
counts at every node. Each budget in a process of its own. What is timed are the functions that the
strategy calls: wrapped, not changed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter, process_time
from typing import Any

import lightning as L
import torch
from offloading.process import in_a_fresh_process
from offloading.report import Asked, Report, table
from torch.utils.data import DataLoader

from offload.graph.taskgraph import HOST
from offload.memory.arenas import Arenas
from offload.memory.cpu_shim import available, load
from strategy.baton import quiet_trainer
from strategy.gpt2 import LENGTH, ROWS, WORDS, make
from strategy.nets import Again, Task, tokens
from trainers import OffloadStrategy

BUDGETS = (None, "60%", "40%", "25%")
SECONDS, PER_CENT = 10.0, 1.0
PATTERN, LINE = 0xA5, 64
STEPS = 2
"""After the first."""
STAGES = {
    "read": ("offload.live.planned_tapes", "graph_of"),
    "measure": ("offload.live.planned_tapes", "measured"),
    "lower": ("offload.live.planned_tapes", "lower"),
    "place": ("offload.plans.kept_plans", "best_plan"),
    "verify": ("offload.plans.kept_plans", "verify"),
}
MIB = 1 << 20


def measure(smoke: bool) -> Report:
    report = Report(
        "plan",
        "Claim: GPT-2-small is planned in <= 10 s, and the predicted peak is the real one to 1 %",
        {"batch": f"{ROWS} x {LENGTH} tokens", "optimizer": "AdamW fused", "steps": STEPS + 1},
    )
    seconds, memory = [], []
    for budget in BUDGETS[1:2] if smoke else BUDGETS:
        row = in_a_fresh_process(one, budget, smoke)
        report.rows.append(row)
        name = budget or "none"
        off = 100 * abs(row["real"] / row["predicted"] - 1)
        report.asked += [
            Asked(f"budget {name}: tape to plan", SECONDS, row["wall"]["all"], "s"),
            Asked(f"budget {name}: predicted peak is off by", PER_CENT, off, "%"),
        ]
        if budget:
            report.asked.append(
                Asked(f"budget {name}: real peak, of it", 1.0, row["real"] / row["budget"])
            )
        seconds.append([name, str(row["tasks"]), *(
            f"{row['wall'].get(stage, 0.0):.2f} ({row['cpu'].get(stage, 0.0):.2f})"
            for stage in (*STAGES, "all")
        )])  # fmt: skip
        memory.append([
            name, row["placement"], *(f"{row[key] / MIB:.2f}" for key in
            ("predicted", "high", "outside", "real")), f"{off:.2f} %", f"{row['touched']:.1%}",
            f"{row['host'] / MIB:.1f}",
        ])  # fmt: skip
        print(" | ".join(seconds[-1] + memory[-1]), flush=True)
    report.tables["Until the first step: wall s (CPU s)"] = table(
        ["budget", "tasks", *STAGES, "all"], seconds
    )
    report.tables["Memory, MiB"] = table(
        ["budget", "placement", "predicted", "arena's high-water mark", "outside of it",
         "real peak", "off by", "touched below the mark", "host"], memory,
    )  # fmt: skip
    report.remarks = [
        "all: from the first step's tape to its plan. The tape itself costs a step's Python and"
        " every distinct kernel on stand-ins. read: from the tape to a graph.",
        "place: walks, layouts and simulations of every plan that was tried. verify: the proof.",
        "outside: the most that lived at once of what kernels allocated while nodes ran.",
    ]
    return report


def one(budget: str | None, smoke: bool) -> dict[str, Any]:
    """In a process of its own."""
    torch.set_num_threads(1)
    available()  # otherwise the first plan waits for the compiler
    torch.manual_seed(0)
    words, length = (512, 16) if smoke else (WORDS, LENGTH)
    net, batches = make(smoke, [tokens(words, ROWS, length) for _ in range(2)])
    strategy, seen = OffloadStrategy(budget), Seen()
    trainer = quiet_trainer(strategy, seen, max_epochs=-1, max_steps=STEPS + 1)
    with seen.watching():
        trainer.fit(Task(net, "AdamW fused"), DataLoader(Again(batches), batch_size=None))
    plan, arena = strategy.plan, seen.arena()
    changed = (arena[: len(arena) // LINE * LINE].view(-1, LINE) != PATTERN).any(1)
    high = (int(changed.nonzero()[-1]) + 1) * LINE
    return {
        "tasks": len(plan.graph.tasks), "placement": plan.placement, "predicted": plan.device_bytes,
        "budget": plan.budget[0], "host": plan.host_bytes, "high": high, "outside": seen.outside,
        "real": high + seen.outside, "touched": float(changed[: high // LINE].float().mean()),
        "tried": list(plan.found.tried), "cpu": seen.cpu, "wall": seen.wall, "budget_asked": budget,
    }  # fmt: skip


class Seen(L.Callback):
    """Of one fit."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.outside = 0
        self._arenas: list[Arenas] = []
        self._kept: torch.Tensor | None = None

    def arena(self) -> torch.Tensor:
        assert self._kept is not None
        return self._kept

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """While the tensors are still in it."""
        self._kept = self._arenas[-1].tensors[0].clone()

    @contextmanager
    def watching_stages(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stage, (module, name) in STAGES.items():
                stack.enter_context(_wrapped(sys.modules[module], name, self._timed(stage)))
            from offload.live.planned_tapes import PlannedTapes

            stack.enter_context(_wrapped(PlannedTapes, "_make", self._timed("all")))
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self.watching_stages(), ExitStack() as stack:
            from offload.running import runner, runner_memory

            stack.enter_context(_wrapped(runner_memory, "Arenas", self._filled))
            stack.enter_context(_wrapped(runner.Runner, "_run", self._counted))
            yield

    def _timed(self, stage: str) -> Callable[..., Any]:
        """Until the first plan is made."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                cpu, wall = process_time(), perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    if "all" not in self.cpu:
                        self.cpu[stage] = self.cpu.get(stage, 0.0) + process_time() - cpu
                        self.wall[stage] = self.wall.get(stage, 0.0) + perf_counter() - wall

            return timed

        return wrap

    def _filled(self, made: Callable[..., Arenas]) -> Callable[..., Arenas]:
        def filled(*args: Any) -> Arenas:
            arenas = made(*args)
            for number, memory in arenas.tensors.items():
                if number != HOST:
                    memory.fill_(PATTERN)
            self._arenas.append(arenas)
            return arenas

        return filled

    def _counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            if available() is None:
                return run(*args)
            with load().counting() as passed:
                bound = run(*args)
                self.outside = max(self.outside, passed.peak)
            return bound

        return counted


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
