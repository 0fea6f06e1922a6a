"""What a guest costs the training: at rest, and with 10 requests a second.

    stretches         no guest x n | at rest x n | asked x m | asked x m | at rest x n ...
    steps of `asked`  A r r A A r r A ...      A: requests come, r: they pause

One training, one plan, one core, so that nothing differs but the guest. The first step of each
stretch is not counted: in it the guest is planned. Stretches of one kind differ by a tenth and
more, because the machine does, so what requests cost is taken from steps that are neighbours.
"""

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from time import perf_counter, process_time, thread_time
from typing import Any

import lightning as L
import torch

from benchmarks.harness.command import Options
from benchmarks.harness.process import run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.sharing.setting import (
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
from offload.gate import Guest
from trainers import OffloadStrategy
from trainers.sharing.high_priority import HighPriority

RATE = 10.0
STRETCH, ASKED_STRETCH = 11, 41
"""Steps, the first of which is not counted."""
ASKED_STEPS = (True, False, False, True)
"""Whether requests come in a step, in turn."""
KINDS = ("no guest", "at rest", "asked")
STRETCHES = 3
"""Of each kind in a round, so that a round has enough steps for one part in a hundred."""


class CountingGate(NotingGate):
    """Also counts the CPU seconds of answers, whatever else the machine does."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 0.0

    @contextmanager
    def granted(self, priority: int = 0, *, inside: bool = False) -> Iterator[Guest]:
        with super().granted(priority, inside=inside) as guest:
            begin = thread_time()
            yield guest
            self.answers += thread_time() - begin


class Stretches(L.Callback):
    """Changes the guest every few steps, and notes what the steps took."""

    def __init__(
        self, strategy: OffloadStrategy, gate: CountingGate, kinds: list[str], smoke: bool
    ) -> None:
        self.found: list[dict[str, Any]] = []
        self.first = {WARM: 0}
        """The stretch that begins with a step."""
        for number, kind in enumerate(kinds):
            self.first[max(self.first) + steps_of(kind, smoke)] = number + 1
        self._strategy, self._gate, self._kinds = strategy, gate, kinds
        self._net, self._x = served(smoke)
        self._right = torch.no_grad()(self._net)(self._x)
        self._rate = 1000.0 if smoke else RATE
        self._number = -1
        self._guest: HighPriority | None = None
        self._opener: threading.Thread | None = None
        self._requests: Requests | None = None
        self._stamps: list[tuple[float, float]] = []

    @property
    def steps(self) -> int:
        return max(self.first)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in self.first:
            self._end()
            self._number = self.first[batch_idx]
            if self._kinds[self._number] != "no guest":
                self._open()
        elif batch_idx - 1 in self.first:
            self._begin()
        elif self._number >= 0:
            self._stamp()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end()

    def _open(self) -> None:
        self._guest = guest = self._strategy.high_priority(self._net)
        # The second request is planned, in this step.
        self._opener = threading.Thread(target=lambda: [guest(self._x) for _ in range(2)])
        self._opener.start()

    def _begin(self) -> None:
        if self._opener is not None:
            self._opener.join()
        self._gate.guests.clear()
        self._gate.answers = 0.0
        if self._kinds[self._number] == "asked":
            assert self._guest is not None
            asked = self._guest, self._x, self._right, self._rate, self._number
            self._requests = Requests(*asked)
            self._requests.begin()
        self._stamps = []
        self._stamp()

    def _stamp(self) -> None:
        if self._requests is not None:
            self._requests.paused = not ASKED_STEPS[len(self._stamps) % len(ASKED_STEPS)]
        self._stamps.append((perf_counter(), process_time()))

    def _end(self) -> None:
        if self._number < 0:
            return
        self._stamp()
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.end()
        kind, wrong = self._kinds[self._number], 0
        if requests is not None:
            wrong = sum(not one.right for one in requests.took)
        guests = self._gate.guests
        for number, (begin, end) in enumerate(pairwise(self._stamps)):
            asked = kind == "asked" and ASKED_STEPS[number % len(ASKED_STEPS)]
            overlaps = (min(one.ended, end[0]) - max(one.granted, begin[0]) for one in guests)
            self.found.append({
                "kind": "paused" if kind == "asked" and not asked else kind,
                "stretch": self._number,
                "wall": end[0] - begin[0],
                "cpu": end[1] - begin[1],
                "answers": sum(max(0.0, seconds) for seconds in overlaps),
                "count": sum(begin[0] <= one.granted < end[0] for one in guests),
            })  # fmt: skip
        self.found[-1] |= {
            "wrong": wrong, "requests": len(guests), "answers_cpu": self._gate.answers
        }  # fmt: skip
        guest, self._guest, self._opener = self._guest, None, None
        if guest is not None:
            guest.close()


def steps_of(kind: str, smoke: bool) -> int:
    return ASKED_STRETCH if kind == "asked" and not smoke else STRETCH


def stretches(smoke: bool, repeats: int) -> list[dict[str, Any]]:
    """In a process of its own, bound to one core."""
    one_core()
    kinds: list[str] = []
    each = 1 if smoke else STRETCHES
    for number in range(repeats * each):
        kinds += KINDS if number % 2 == 0 else KINDS[::-1]
    gate = CountingGate()
    strategy = strategy_with(gate)
    watch = Stretches(strategy, gate, kinds, smoke)
    fitted(strategy, TINY if smoke else SIZE, watch.steps, [watch])
    return [{"round": row["stretch"] // (len(KINDS) * each), **row} for row in watch.found]


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    rows = run_in_fresh_process(partial(stretches, smoke, repeats))
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

    lost = {what: lost_over_answers(rows, what) for what in ("wall", "cpu")}
    report.tables["A step of the training"] = format_table(
        ["guest", "steps", "CPU ms", "wall ms", "answers ms", "answers"],
        [
            [
                kind,
                f"{sum(row['kind'] == kind for row in rows)}",
                *(
                    format_spread([1e3 * s for s in of(kind, what)])
                    for what in ("cpu", "wall", "answers")
                ),
                f"{sum(row['count'] for row in rows if row['kind'] == kind)}",
            ]
            for kind in ("no guest", "at rest", "paused", "asked")
        ],
    )
    rest = [a / b for a, b in zip(of("at rest", "cpu"), of("no guest", "cpu"), strict=True)]
    report.asked = [
        Target("a guest at rest over no guest, CPU time", 1.01, statistics.median(rest)),
        Target("lost time over the time of the answers", 1.1, median_of(lost["wall"])),
        Target("the same, CPU time", 1.1, median_of(lost["cpu"])),
        Target("answers with other bits", 0, sum(row.get("wrong", 0) for row in rows)),
    ]
    report.remarks += [
        "answers ms: the time in which requests had the device, for each step of the training."
        " Lost: steps with requests less their neighbours without, over what answers they had more"
        f" of. By rounds, wall: {listed(lost['wall'])}; CPU: {listed(lost['cpu'])}.",
        "The clocks of threads see all that Python and the gate do for a request, but not that the"
        " training's next kernels find colder caches.",
    ]
    return report


def lost_over_answers(rows: list[dict[str, Any]], what: str) -> list[float]:
    """Return, of each round, what steps with requests took more than their neighbours, over what
    their answers took."""
    found = []
    for number in range(max(row["round"] for row in rows) + 1):
        of = {
            kind: [row for row in rows if (row["kind"], row["round"]) == (kind, number)]
            for kind in ("asked", "paused")
        }

        def more(key: str, of: dict[str, list[dict[str, Any]]] = of) -> float:
            return sum(row[key] for row in of["asked"]) - sum(row[key] for row in of["paused"])

        if what == "wall":
            answers = more("answers")
        else:  # the clock of a thread is read once a stretch, and most of its answers are here
            both = [*of["asked"], *of["paused"]]
            seconds = sum(row.get("answers_cpu", 0.0) for row in both)
            answers = seconds * more("count") / max(1, sum(row["count"] for row in both))
        if answers > 0:
            found.append(more(what) / answers)
    return found


def median_of(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values) or "no request came"
