"""What a guest costs the training: at rest, and with 10 requests a second.

    steps   no guest x n | at rest x n | asked x n | asked x n | at rest x n | no guest x n ...

One training, one plan, one core, so that nothing differs but the guest. The first step of each
stretch is not counted: in it the guest is captured.
"""

import statistics
import threading
from functools import partial
from time import perf_counter, process_time
from typing import Any

import lightning as L
import torch
from offloading.process import in_a_fresh_process
from offloading.report import Asked, Report, spread, table

from sharing.setting import (
    SIZE,
    TINY,
    WARM,
    NotingGate,
    Requests,
    fitted,
    one_core,
    served,
    strategy_with,
)
from trainers import OffloadStrategy
from trainers.sharing.high_priority import HighPriority

RATE = 10.0
STRETCH = 11
"""Steps, the first of which is not counted."""
KINDS = ("no guest", "at rest", "asked")
STRETCHES = 3
"""Of each kind in a round, so that a round has enough steps for one part in a hundred."""


class Stretches(L.Callback):
    """Changes the guest every few steps, and notes what the steps took."""

    def __init__(
        self, strategy: OffloadStrategy, gate: NotingGate, kinds: list[str], smoke: bool
    ) -> None:
        self.found: list[dict[str, Any]] = []
        self._strategy, self._gate, self._kinds = strategy, gate, kinds
        self._net, self._x = served(smoke)
        self._right = torch.no_grad()(self._net)(self._x)
        self._rate = 50.0 if smoke else RATE
        self._guest: HighPriority | None = None
        self._opener: threading.Thread | None = None
        self._requests: Requests | None = None
        self._begun = (0.0, 0.0)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx < WARM:
            return
        number, step = divmod(batch_idx - WARM, STRETCH)
        if step == 0:
            self._end(number - 1)
            if self._kinds[number] != "no guest":
                self._open()
        elif step == 1:
            self._begin(number)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end(len(self._kinds) - 1)

    def _open(self) -> None:
        self._guest = guest = self._strategy.high_priority(self._net)
        self._opener = threading.Thread(target=guest, args=(self._x,))  # captured in this step
        self._opener.start()

    def _begin(self, number: int) -> None:
        if self._opener is not None:
            self._opener.join()
        self._gate.guests.clear()
        if self._kinds[number] == "asked":
            assert self._guest is not None
            self._requests = Requests(self._guest, self._x, self._right, self._rate, number)
            self._requests.begin()
        self._begun = perf_counter(), process_time()

    def _end(self, number: int) -> None:
        if number < 0:
            return
        wall, cpu = perf_counter() - self._begun[0], process_time() - self._begun[1]
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.end()
        until = self._begun[0] + wall
        self.found.append({
            "kind": self._kinds[number],
            "wall": wall / (STRETCH - 1),
            "cpu": cpu / (STRETCH - 1),
            "answers": sum(min(one.ended, until) - one.granted for one in self._gate.guests
                           if one.granted < until) / (STRETCH - 1),
            "count": len(self._gate.guests),
            "wrong": sum(not one.right for one in requests.took) if requests else 0,
        })  # fmt: skip
        guest, self._guest, self._opener = self._guest, None, None
        if guest is not None:
            guest.close()


def stretches(smoke: bool, repeats: int) -> list[dict[str, Any]]:
    """In a process of its own, bound to one core."""
    one_core()
    kinds: list[str] = []
    each = 1 if smoke else STRETCHES
    for number in range(repeats * each):
        kinds += KINDS if number % 2 == 0 else KINDS[::-1]
    gate = NotingGate()
    strategy = strategy_with(gate)
    watch = Stretches(strategy, gate, kinds, smoke)
    fitted(strategy, TINY if smoke else SIZE, WARM + STRETCH * len(kinds), [watch])
    return [{"round": n // (len(KINDS) * each), **row} for n, row in enumerate(watch.found)]


def measure(smoke: bool, repeats: int) -> Report:
    rows = in_a_fresh_process(partial(stretches, smoke, repeats))
    report = Report(
        "cost",
        "a guest at rest costs nothing, and one that is asked costs its answers",
        {"rounds": repeats, "requests a second": RATE, "cores": 1},
    )
    report.rows = rows

    def of(kind: str, what: str) -> list[float]:
        """A mean of each round."""
        return [
            statistics.mean(row[what] for row in rows if (row["kind"], row["round"]) == (kind, n))
            for n in range(repeats)
        ]

    report.tables["A step of the training"] = table(
        ["guest", "CPU ms", "wall ms", "answers ms", "answers", "wrong"],
        [
            [
                kind,
                *(spread([1e3 * s for s in of(kind, what)]) for what in ("cpu", "wall", "answers")),
                *(f"{sum(r[what] for r in rows if r['kind'] == kind)}"
                  for what in ("count", "wrong")),
            ]
            for kind in KINDS
        ],
    )  # fmt: skip
    rest = [a / b for a, b in zip(of("at rest", "cpu"), of("no guest", "cpu"), strict=True)]
    lost = [
        (asked - free) / answers
        for asked, free, answers in zip(
            of("asked", "wall"), of("no guest", "wall"), of("asked", "answers"), strict=True
        )
    ]
    report.asked = [
        Asked("a guest at rest over no guest, CPU time", 1.01, statistics.median(rest)),
        Asked("lost time over the time of the answers", 1.1, statistics.median(lost)),
        Asked("answers with other bits", 0, sum(row["wrong"] for row in rows)),
    ]
    report.remarks.append(
        "answers ms: the time in which requests had the device, for each step of the training."
        " Lost: wall time of a step less that of a step without a guest, of the same round."
    )
    return report
