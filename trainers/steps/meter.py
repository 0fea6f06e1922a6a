"""Measures how long planned steps took, and how much of that they waited for transfers.

    Runner.run  | copy batch in | F1 F2 ....... F3 F4 ..... U1 | outputs |
    seconds     |-------------------------------------------------------|
    compute                       == ==         == ==       ==             kernels run
    transfer                           -------        -----                no kernel can run

A transfer stall is the time in a step in which the compute lane could run no kernel, because all
remaining kernels waited for copies, or for updates on the host whose state was moved there to make
room. The time to choose the next kernel and to hand over batch and outputs counts as neither: a
step without copies has no transfer stall. (Ranks wait for one another inside a kernel, the
all-reduce.)

Measuring a step costs 0.1 us per node and stores a few numbers; the rest is computed on request.

On a GPU the host enqueues a step and goes on, so only timed runs say how long they took. The first
`FIRST` runs of every plan are timed, and then every `EVERY`th; the others count as the latest of
these.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from offload import Plan
from offload.graph.memgraph import OFFLOAD, RELOAD
from offload.running.trace import Trace

LATEST = 255
"""A median is over the latest so many runs."""
FIRST, EVERY = 6, 50
"""The runs of a plan that are timed where timing costs something."""


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """The time that all planned steps of a fit took so far. If gradients are accumulated, each
    micro-batch is a run. A step that asks for a value in its middle is several."""

    runs: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    planning_seconds: float = 0.0
    """The time for planning, which none of the others contains."""
    plans: int = 0
    """The number of plans that were made."""
    inputs: str = ""
    """The shapes of the last batch."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredPlan:
    """A plan, and the time that its runs took."""

    plan: Plan
    inputs: str
    """The shapes of the batch."""
    part: str
    """The part of an optimizer step that the plan makes."""
    copies: int
    bytes_in: int
    """The bytes that a run copies to the device."""
    bytes_out: int
    spent: TimeSpent
    median_seconds: float
    """The median of the latest runs."""
    held_bytes: int
    """The most bytes in use at once on the fullest device, in the last timed run."""


@dataclass(slots=True, eq=False)
class _Tally:
    plan: Plan
    inputs: str
    part: str
    runs: int = 0
    seconds: float = 0.0
    compute: float = 0.0
    transfer: float = 0.0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    trace: Trace = field(default_factory=Trace)
    """The trace of the latest timed run."""
    took: tuple[float, float, float] | None = None
    """The seconds of that run: in all, in kernels, waiting for transfers."""


@final
class Meter:
    """Counts the runs and the seconds of one fit."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tallies: dict[Hashable, _Tally] = {}
        self._runs, self._plans = 0, 0
        self._inputs = ""
        self._seconds = self._compute = self._transfer = self._planning = 0.0

    # ---- called by who runs steps ---------------------------------------------------------------

    @contextmanager
    def planning(self) -> Iterator[None]:
        since = self._clock()
        try:
            yield
        finally:
            self._planning += self._clock() - since

    def add(self, key: Hashable, plan: Plan, inputs: str, part: str) -> None:
        self._plans += 1
        if key in self._tallies:  # what ran by the plan that it replaces has run
            self._tallies[object()] = self._tallies.pop(key)
        self._tallies[key] = _Tally(plan, inputs, part)

    def begin(self) -> float:
        """Return the time now, which `ran` needs."""
        return self._clock()

    def wants_times(self, key: Hashable) -> bool:
        """Whether the next run of this plan is to be timed."""
        runs = self._tallies[key].runs
        return runs < FIRST or runs % EVERY == 0

    def ran(self, key: Hashable, begun: float, trace: Trace) -> None:
        own = self._clock() - begun
        tally = self._tallies[key]
        if trace.timed:
            tally.took, tally.trace = (own, trace.computed, trace.waited), trace
            tally.latest.append(own)
        seconds, compute, transfer = tally.took or (own, 0.0, 0.0)
        self._runs += 1
        self._seconds += seconds
        self._compute += compute
        self._transfer += transfer
        self._inputs = tally.inputs
        tally.runs += 1
        tally.seconds += seconds
        tally.compute += compute
        tally.transfer += transfer

    # ---- results --------------------------------------------------------------------------------

    @property
    def spent(self) -> TimeSpent:
        return TimeSpent(
            self._runs,
            self._seconds,
            self._compute,
            self._transfer,
            self._planning,
            self._plans,
            self._inputs,
        )

    @property
    def plans(self) -> tuple[MeasuredPlan, ...]:
        """The plans that ran, in the order of their first use."""
        return tuple(_measured(tally) for tally in self._tallies.values() if tally.runs)


def _measured(tally: _Tally) -> MeasuredPlan:
    nodes = tally.plan.memgraph.nodes
    moved = {
        kind: sum(node.nbytes for node in nodes if node.kind == kind) for kind in (RELOAD, OFFLOAD)
    }
    return MeasuredPlan(
        plan=tally.plan,
        inputs=tally.inputs,
        part=tally.part,
        copies=sum(node.kind in moved for node in nodes),
        bytes_in=moved[RELOAD],
        bytes_out=moved[OFFLOAD],
        spent=TimeSpent(tally.runs, tally.seconds, tally.compute, tally.transfer, plans=1),
        median_seconds=statistics.median(tally.latest or [tally.seconds / tally.runs]),
        held_bytes=_most_held_bytes(tally.plan, tally.trace),
    )


def _most_held_bytes(plan: Plan, trace: Trace) -> int:
    """Return the most bytes in use, with the workspace that kernels share during the whole step."""
    shared = {device: place.nbytes for device, place in plan.memgraph.scratch.items()}
    held = [nbytes + shared.get(device, 0) for _, device, nbytes in trace.bytes_in_use()]
    return max(held, default=0) + plan.reserve
