"""From a request to its start and its answer, beside a training that fills the same core.

ours         the answer comes between two nodes of a step (`strategy.high_priority`)
threads      nobody waits: the net runs in the thread that asks, and the system slices the time
step grain   the same gate as ours, asked between two steps only (Gandiva's alternation)
process      the net is in a second process on the same core, and the system slices the time

All ways train the same steps and get the same requests. The second process needs no gate and no
lock of Python, but another copy of everything, which a GPU's memory does not hold.
"""

import multiprocessing
import statistics
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

import lightning as L
import torch

from benchmarks.harness.command import Options
from benchmarks.harness.process import run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.harness.rounds import alternate_rounds
from benchmarks.sharing.setting import (
    SIZE,
    TINY,
    WARM,
    BetweenSteps,
    NotingGate,
    Requests,
    compared,
    fitted,
    one_core,
    served,
    strategy_with,
)
from trainers import OffloadStrategy
from trainers.sharing.high_priority import Percentiles

RATE = 4.0
"""Requests a second."""
WRONG = ("wrong", "weights that differ")
WAYS = ("ours", "threads", "step grain", "process")


class Asking(L.Callback):
    """Asks from step WARM to the end, and keeps when each node ran."""

    def __init__(self, strategy: OffloadStrategy, begin: Callable[[], object]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.steps: list[float] = []
        """When each step began, from the first with requests."""
        self.over = 0.0
        self._strategy, self._begin = strategy, begin

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == WARM:
            self._begin()
        if batch_idx >= WARM:
            self.steps.append(perf_counter())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        session = self._strategy._run.session.live
        runner = session.plans.runner if session is not None else None
        if self.steps and runner is not None:
            spans = runner.trace.spans
            self.starts += [span.start for span in spans]
            self.ends += [span.end for span in spans]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.over = perf_counter()

    def left(self, moment: float) -> float:
        """Seconds that the node of this moment had left."""
        place = bisect_right(self.starts, moment) - 1
        return max(0.0, self.ends[place] - moment) if place >= 0 else 0.0


def serve_alone(smoke: bool, rate: float, seed: int, begin: Any, over: Any, found: Any) -> None:
    """The second process."""
    one_core()
    net, x = served(smoke)
    answer = torch.no_grad()(net)
    requests = Requests(answer, x, answer(x), rate, seed)
    found.put(None)
    begin.wait()
    requests.begin()
    over.wait()
    requests.end()
    found.put(requests.took)


def one(way: str, smoke: bool, seed: int) -> dict[str, Any]:
    """Train once beside requests that come in this way."""
    size, steps, rate = (TINY, WARM + 60, 20.0) if smoke else (SIZE, WARM + 40, RATE)
    net, x = served(smoke)
    answer = torch.no_grad()(net)
    right = answer(x)
    gate = BetweenSteps() if way == "step grain" else NotingGate()
    strategy = strategy_with(gate)
    with ExitStack() as stack:
        if way == "process":
            spawn = multiprocessing.get_context("spawn")
            begin, over, found = spawn.Event(), spawn.Event(), spawn.Queue()
            child = spawn.Process(
                target=serve_alone, args=(smoke, rate, seed, begin, over, found), daemon=True
            )
            child.start()
            stack.callback(child.join)
            stack.callback(over.set)
            found.get()
            asking = Asking(strategy, begin.set)
            weights = fitted(strategy, size, steps, [asking])
            over.set()
            took = found.get()
        else:
            ask: Callable[[torch.Tensor], torch.Tensor] = answer
            if way != "threads":
                ask = stack.enter_context(strategy.high_priority(net))
                for _ in range(2):
                    ask(x)  # the second one is planned
            requests = Requests(ask, x, right, rate, seed)
            asking = Asking(strategy, requests.begin)
            weights = fitted(strategy, size, steps, [asking])
            requests.end()
            took = requests.took
    took = [one for one in took if one.due < asking.over]
    guests = [one for one in gate.guests if asking.steps[0] < one.asked < asking.over]
    return {
        "way": way,
        "answers": [one.seconds for one in took],
        "wrong": sum(not one.right for one in took),
        "starts": [guest.granted - guest.asked for guest in guests],
        "first": [
            not any(one.asked < guest.asked < one.ended for one in guests) for guest in guests
        ],
        "left": [asking.left(guest.asked) for guest in guests],
        "step": (asking.over - asking.steps[0]) / len(asking.steps),
        "weights": weights,
    }


def rounds(smoke: bool, repeats: int) -> list[dict[str, Any]]:
    """In a process of its own, bound to one core."""
    one_core()
    rows = []
    for number, order in alternate_rounds(WAYS, repeats):
        found = {way: one(way, smoke, number) for way in order}
        rows += compared(number, [found[way] for way in WAYS])
    return rows


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    rows = run_in_fresh_process(partial(rounds, smoke, repeats))
    report = Report(
        "latency",
        "a request waits for the running node, and not for the step",
        {"rounds": repeats, "requests a second": RATE, "cores": 1},
    )
    report.rows = rows
    lines = []
    p95: dict[str, list[float]] = {}
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        each = [Percentiles.of_seconds(row["answers"]) for row in mine]
        p95[way] = [one.p95 for one in each]
        lines.append([
            way,
            *(format_spread([1e3 * getattr(one, name) for one in each]) for name in ("p50", "p95")),
            format_spread([1e3 * one.most for one in each]),
            format_spread([1e3 * row["step"] for row in mine]),
            f"{sum(len(row['answers']) for row in mine)}",
            " + ".join(f"{sum(row[what] for row in mine)}" for what in WRONG),
        ])  # fmt: skip
    head = ["way", "answer p50 ms", "p95 ms", "longest ms", "step ms", "answers", "wrong"]
    report.tables["From a request's due time to its answer"] = format_table(head, lines)
    ours = [row for row in rows if row["way"] == "ours"]
    every, starts, left = (
        [
            Percentiles.of_seconds(
                [s for s, first in zip(row[what], row["first"], strict=True) if first or not alone]
            ).p95
            for row in ours
        ]
        for what, alone in (("starts", False), ("starts", True), ("left", True))
    )
    report.tables["From a request to its start, ours, p95 ms"] = format_table(
        ["all requests", "those that found no other one", "what was left of their node"],
        [[format_spread([1e3 * value for value in values]) for values in (every, starts, left)]],
    )
    over = [start / (1.2 * rest + 1e-3) for start, rest in zip(starts, left, strict=True)]
    grain = [b / a for a, b in zip(p95["ours"], p95["step grain"], strict=True)]
    report.asked = [
        Target("start p95 over 1.2 x p95 of the node's rest + 1 ms", 1.0, statistics.median(over)),
        Target("answer p95, step grain over ours", 5.0, statistics.median(grain), at_least=True),
        Target(
            "a step", 300.0, statistics.median(1e3 * row["step"] for row in ours), "ms",
            at_least=True,
        ),
        Target(
            "answers and weights with other bits", 0,
            sum(row[what] for row in rows for what in WRONG),
        ),
    ]  # fmt: skip
    report.remarks = [
        "Everything is bound to one core with one thread of torch, so that the core stands in for"
        " a device that the training fills. With a second core to itself, a thread or process"
        " beside the training waits for nothing.",
        "A request's time begins when it is due, not when a thread came to ask."
        " What is left of a node is taken from the trace of the step it ran in.",
        "A request that finds another one waits for its answer, too, so the start that is asked is"
        " that of the others.",
        "wrong: answers that are not the net's own, and weights that are not those of `ours`.",
    ]
    return report
