"""A fleet without devices, threads and torch: its jobs' metrics are given as curves.

It has what a search needs of a `Fleet`. Its jobs take turns of one rung, and may be killed between
two of them; another one with the same journal goes on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainers.fleet.keeping.fleet_result import FleetResult, JobResult

Curve = Mapping[int, float]


class Killed(Exception):
    """The process is gone."""


@dataclass
class FakeFleet:
    """A program is called with a seat and returns its curve: the metric at each rung."""

    folder: Path
    metric: str | None = "val_loss"
    mode: str = "min"
    rule: Any = None
    turns: Callable[[list[str]], str] = min
    """Which of the living jobs has the next turn."""
    journal: list[tuple[Any, ...]] = field(default_factory=list)
    kill_after: int = 10**9
    """Events of this process."""
    added: dict[str, Any] = field(default_factory=dict)
    alive_at_most: int = 0

    def __post_init__(self) -> None:
        self._past = list(self.journal)
        self._listeners: list[Callable[[JobResult, Curve], None]] = []
        self.seen: dict[str, dict[int, float]] = {}
        self.gone: dict[str, str] = {}
        self.results: dict[str, JobResult] = {}

    def add_program(self, name: str, program: Any) -> None:
        assert name not in self.added
        self.added[name] = program
        self.seen[name] = {}
        living = [job for job in self.added if job not in self.gone]
        self.alive_at_most = max(self.alive_at_most, len(living))

    def on_end(self, call: Callable[[JobResult, Curve], None]) -> None:
        self._listeners.append(call)

    def fit(self) -> FleetResult:
        for event in self._past:
            self._apply(*event)
        while living := [job for job in self.added if job not in self.gone]:
            job = self.turns(living)
            for event in self._turn(job):
                if self.kill_after == 0:
                    raise Killed
                self.kill_after -= 1
                self.journal.append(event)
                self._apply(*event)
        return FleetResult(self.results, self.seen, self.metric, self.mode)

    def _turn(self, job: str) -> list[tuple[Any, ...]]:
        try:
            curve = self.added[job](SimpleNamespace(name=job))
        except Exception as error:
            return [("end", job, "failed", f"{type(error).__name__}: {error}")]
        left = [step for step in sorted(curve) if step not in self.seen[job]]
        if not left:
            return [("end", job, "finished", "")]
        return [("report", job, left[0], curve[left[0]])]

    def _apply(self, kind: str, job: str, first: Any, second: Any) -> None:
        if kind == "report":
            self.seen[job][first] = second
            if self.rule is not None:
                for stopped, why in self.rule.judge(self.seen, self.gone).items():
                    assert stopped == job, "only a job at a rung can be stopped"
                    self._end(job, "stopped", why)
        else:
            self._end(job, first, second)

    def _end(self, job: str, state: str, why: str) -> None:
        self.gone[job] = state
        values = self.seen[job]
        last = values[max(values)] if values else None
        result = JobResult(job, state, max(values, default=0), last, 1.0, why, "", self.folder)
        self.results[job] = result
        for call in self._listeners:
            call(result, values)


class SearchedFleet(FakeFleet):
    """`SearchedJob` gives no curve back, as a program of a fleet does not: the fake takes it."""

    def add_program(self, name: str, program: Any) -> None:
        super().add_program(name, lambda seat: program.make(program.params)(seat))
