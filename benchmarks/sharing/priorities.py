"""From adding a job of higher priority to its beginning, while a fleet trains one of long steps.

in mid-step     the step stands aside between two of its nodes (ours)
between steps   the step under way ends first

The job that comes is built by its own function, so its beginning is the moment of that call. Both
ways train the same steps of the same low job, and have the same arrivals.
"""

import random
import statistics
import tempfile
import threading
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from benchmarks.fleet_peers.gpt_jobs import GptJob
from benchmarks.harness.command import Options
from benchmarks.harness.process import run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.harness.rounds import alternate_rounds
from benchmarks.sharing.setting import SIZE, TINY, compared, data, one_core
from trainers.fleet import Fleet
from trainers.fleet.deciding.events import Planned, TurnEnded
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.jobs.job_turns import FINAL
from trainers.sharing.high_priority import Percentiles

WAYS = ("in mid-step", "between steps")
RULE = "trainers.fleet.deciding.decide.worth_standing_aside"
QUIET = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
HIGH_STEPS = 4


class Arrivals:
    """Adds one small job after the other, each some time after the end of the one before."""

    def __init__(self, fleet: Fleet, seed: int, pause: float, most: int) -> None:
        self.waits: list[float] = []
        self._most = most
        self._fleet, self._chance, self._pause = fleet, random.Random(seed), pause
        self._over, self._free = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def begin(self) -> None:
        self._thread.start()

    def see(self, state: FleetState) -> None:
        """The low job may have ended, or the one that came last."""
        jobs = [*state.jobs.values()]
        if all(job.ended for job in jobs[1:]):
            self._free.set()
        if jobs[0].ended:
            self._over.set()
            self._free.set()

    def end(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        for number in range(self._most):
            if self._over.wait(self._pause * (0.5 + self._chance.random())):
                return
            self._free.clear()
            added = perf_counter()
            self._fleet.add(
                f"high{number}", partial(self._made, added), train=partial(data, TINY, HIGH_STEPS),
                trainer=QUIET, seed=number, priority=1,
            )  # fmt: skip
            self._free.wait()

    def _made(self, added: float) -> GptJob:
        self.waits.append(perf_counter() - added)
        return GptJob(TINY, 1e-3)


def one(way: str, smoke: bool, seed: int) -> dict[str, Any]:
    size, steps, pause, most = (TINY, 300, 0.1, 2) if smoke else (SIZE, 80, 2.0, 10)
    asides = 0

    def see(state: FleetState, event: object) -> None:
        nonlocal asides
        if isinstance(event, Planned) and event.job == "low":
            arrivals.begin()
        asides += isinstance(event, TurnEnded) and event.aside
        arrivals.see(state)

    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(folder=folder, watch=see)
        arrivals = Arrivals(fleet, seed, pause, most)
        fleet.add(
            "low", partial(GptJob, size, 1e-4), train=partial(data, size, steps), trainer=QUIET,
            seed=0, offload={},
        )  # fmt: skip
        begin = perf_counter()
        with mock.patch(RULE, return_value=way == WAYS[0]):
            result = fleet.fit()
        arrivals.end()
        weights = torch.load(result.jobs["low"].folder / FINAL, weights_only=True)["state_dict"]
        failed = [job.why for job in result.jobs.values() if job.state != "finished"]
    assert not failed, failed
    low = result.jobs["low"]
    return {
        "way": way,
        "waits": arrivals.waits,
        "asides": asides,
        "step": low.seconds / steps,
        "seconds": perf_counter() - begin,
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
        "priorities",
        "a job of higher priority begins at the next node, and not after the step",
        {"rounds": repeats, "cores": 1},
    )
    report.rows = rows
    lines, p95 = [], {}
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        each = [Percentiles.of_seconds(row["waits"]) for row in mine]
        p95[way] = [one.p95 for one in each]
        lines.append([
            way,
            *(format_spread([1e3 * getattr(one, name) for one in each]) for name in ("p50", "p95")),
            format_spread([1e3 * one.most for one in each]),
            f"{sum(len(row['waits']) for row in mine)}",
            f"{sum(row['asides'] for row in mine)}",
            format_spread([1e3 * row["step"] for row in mine]),
        ])  # fmt: skip
    head = ["way", "p50 ms", "p95 ms", "longest ms", "jobs", "steps that stood aside", "step ms"]
    report.tables["From add() to the job's beginning"] = format_table(head, lines)
    gain = [b / a for a, b in zip(p95[WAYS[0]], p95[WAYS[1]], strict=True)]
    report.asked = [
        Target("p95, between steps over in mid-step", 5.0, statistics.median(gain), at_least=True),
        Target("weights with other bits", 0, sum(row["weights that differ"] for row in rows)),
    ]
    report.remarks = [
        "The wait contains the copy of what the step has in the arena to the host. A job that comes"
        " between two steps waits for nothing in either way."
    ]
    return report
