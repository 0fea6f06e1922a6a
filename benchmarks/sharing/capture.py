"""How long a request waits while the first step of a training is captured, profiled and planned."""

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from fleet_peers.gpt_jobs import GptSize
from offloading.report import Asked, Report, table

from sharing.setting import SIZE, TINY, NotingGate, fitted, served
from trainers import OffloadStrategy
from trainers.offloading.steps.micro_batch import MicroBatch, StepGraph
from trainers.offloading.tracing.batch_parts import BatchParts
from trainers.sharing.waits import Percentiles

PAUSE = 0.005
"""Seconds between an answer and the next request."""
DEEP = GptSize(layers=12, width=64, heads=4, length=32, words=256, batch=2)
"""Many small nodes: tracing and planning take longer than the kernels."""


class NotesCaptures(OffloadStrategy):
    """Keeps when its first step was captured and planned."""

    begun = ended = 0.0

    def _capture(self, micro: MicroBatch) -> tuple[BatchParts, StepGraph]:
        if self.begun:
            return super()._capture(micro)
        self.begun = perf_counter()
        try:
            return super()._capture(micro)
        finally:
            self.ended = perf_counter()


def in_a_loop(ask: Callable[[], object], over: threading.Event) -> None:
    while not over.wait(PAUSE):
        ask()


def one(size: GptSize, smoke: bool, steps: int) -> dict[str, Any]:
    net, x = served(smoke)
    right = torch.no_grad()(net)(x)
    gate = NotingGate()
    gate.close()
    strategy = NotesCaptures()
    strategy._guests.gate = gate
    wrong: list[bool] = []
    over = threading.Event()
    with strategy.high_priority(net) as serve:
        serve(x)
        thread = threading.Thread(
            target=in_a_loop, args=(lambda: wrong.append(not torch.equal(serve(x), right)), over)
        )
        thread.start()
        try:
            fitted(strategy, size, steps, [])
        finally:
            over.set()
            thread.join()
    waits = [
        one.granted - one.asked
        for one in gate.guests
        if strategy.begun < one.granted and one.asked < strategy.ended
    ]
    return {"seconds": strategy.ended - strategy.begun, "waits": waits, "wrong": sum(wrong)}


def measure(smoke: bool, repeats: int) -> Report:
    sizes = {"tiny": TINY} if smoke else {"4 wide layers": SIZE, "12 narrow layers": DEEP}
    report = Report(
        "capture", "a request does not wait for a capture or a plan", {"rounds": repeats}
    )
    for number in range(repeats):
        for name, size in sizes.items():
            report.rows.append({"training": name, "round": number, **one(size, smoke, 4)})
    report.tables["Requests during the first capture and plan"] = table(
        ["training", "it took s", "requests", "grant p50 / p95 / max", "wrong"],
        [_line(row) for row in report.rows],
    )
    waits = [wait for row in report.rows for wait in row["waits"]]
    report.asked = [
        Asked("grant, the longest of all", 50.0, 1e3 * max(waits, default=float("nan")), "ms"),
        Asked("answers with other bits", 0, sum(row["wrong"] for row in report.rows)),
    ]
    report.remarks.append(
        "The requests' own net was captured before the training began. All cores, torch's threads."
    )
    return report


def _line(row: dict[str, Any]) -> Sequence[str]:
    said = Percentiles.of(row["waits"]).said()
    return [
        row["training"], f"{row['seconds']:.2f}", f"{len(row['waits'])}", said, f"{row['wrong']}"
    ]  # fmt: skip
