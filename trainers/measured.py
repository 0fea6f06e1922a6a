"""What planned steps took, and of that how long they waited.

    Runner.run  | to its place | F1 F2 ....... F3 F4 ..... U1 | outputs |
    seconds     |------------------------------------------------------|
    compute                      == ==         == ==       ==             kernels run
    transfer                          -------        -----                none can

Transfer stall: the seconds of a step in which the compute engine had no kernel that it could run,
as all that were left waited for copies (or for updates on the host, where the state went to make
room). What it takes to choose the next kernel, and to hand over the batch and the outputs, is
neither: a step without copies has no transfer stall. (Ranks wait for one another inside a kernel,
the all-reduce.)

A step costs 0.1 us a node and a few numbers to write down; the rest is made when it is asked for.

On a GPU the host enqueues a step and goes on: only runs that are looked at say what they took. The
first of every plan are, and every `EVERY`th; the others count as the latest of these.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from offload import Plan
from offload.memgraph import OFFLOAD, RELOAD
from offload.trace import Trace

LATEST = 255
"""So many runs are in a median."""
FIRST, EVERY = 6, 50
"""Runs of a plan that are looked at, where that costs something."""


@dataclass(frozen=True, slots=True)
class Spent:
    """By all planned steps of a fit so far; where gradients are accumulated, by its micro-batches:
    each is a run, or all of a step are one (groups.py)."""

    runs: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    planning_seconds: float = 0.0
    """Capturing and planning; in none of the others."""
    plans: int = 0
    """That were made, be they kept or not."""
    inputs: str = ""
    """Shapes of the last batch."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredPlan:
    """A plan, and what its runs took."""

    plan: Plan
    inputs: str
    """Shapes of the batch."""
    part: str
    """Of an optimizer step."""
    copies: int
    bytes_in: int
    """To the device, in a run."""
    bytes_out: int
    spent: Spent
    median_seconds: float
    """Of the latest runs."""
    held_bytes: int
    """The most that held something at once on the fullest device, in the last run."""


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
    """Of the latest run that was looked at, and its seconds: all, kernels, waiting."""
    took: tuple[float, float, float] | None = None


@final
class Meter:
    """Of one fit."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tallies: dict[Hashable, _Tally] = {}
        self._runs, self._plans = 0, 0
        self._inputs = ""
        self._seconds = self._compute = self._transfer = self._planning = 0.0

    # ---- what is noted --------------------------------------------------------------------------

    @contextmanager
    def planning(self) -> Iterator[None]:
        since = self._clock()
        try:
            yield
        finally:
            self._planning += self._clock() - since

    def planned(self, key: Hashable, plan: Plan, inputs: str, part: str) -> None:
        self._plans += 1
        self._tallies[key] = _Tally(plan, inputs, part)

    def priced(self, key: Hashable, plan: Plan) -> None:
        """The same plan, its seconds predicted by what its first runs took."""
        self._tallies[key].plan = plan

    def begin(self) -> float:
        """To be given to `ran`."""
        return self._clock()

    def looks(self, key: Hashable) -> bool:
        """Whether the next run of this is one to look at."""
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

    def forget(self, key: Hashable) -> None:
        """A plan that is not kept. What its runs took stays in `spent`."""
        self._tallies.pop(key, None)

    # ---- what is asked --------------------------------------------------------------------------

    @property
    def spent(self) -> Spent:
        return Spent(
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
        """Those that ran and are kept, by their first use."""
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
        spent=Spent(tally.runs, tally.seconds, tally.compute, tally.transfer, plans=1),
        median_seconds=statistics.median(tally.latest or [tally.seconds / tally.runs]),
        held_bytes=_held(tally.plan, tally.trace),
    )


def _held(plan: Plan, trace: Trace) -> int:
    """With what has its place for the whole step: a workspace that many kernels share."""
    shared = {device: place.nbytes for device, place in plan.memgraph.scratch.items()}
    held = [nbytes + shared.get(device, 0) for _, device, nbytes in trace.bytes_in_use()]
    return max(held, default=0) + plan.reserve
