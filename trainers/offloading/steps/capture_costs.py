"""Says when a run without a budget captures more than its plans can earn, and goes on eagerly.

    micro-batches  c c c c c c c c ...      each has another shape, and each capture takes a second
    left           400 of 20 ms             a plan without a budget saves a tenth of that: 0.8 s

Such a plan saves a little of the host's work in each step, and no memory. So a run that goes on
capturing stops that where it has spent more on captures than the steps that are left could save,
or, where these have no end, after `MOST` captures. A run with a budget needs its plans for
something else, and never stops.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from offload import CaptureError
from trainers.offloading.hardware.meter import TimeSpent

log = logging.getLogger(__name__)

LEAST = 8
"""So many captures are nothing to worry about."""
MOST = 64
"""After so many, a run that still captures does not become one of a few shapes."""
RECENT = 16
"""Micro-batches that show whether a run still captures."""
SAVED = 0.1
"""The part of a step that a plan without a budget is reckoned to save. It depends on the step: 0.87
to 1.26 of plain Lightning's time were measured (benchmarks/results/*_strategy_cpu_overhead*.md)."""


@dataclass(frozen=True, slots=True)
class CaptureCosts:
    """What captures have taken, and what they are for."""

    captures: int
    seconds: float
    recent: int
    """Captures in the latest `RECENT` micro-batches."""
    step_seconds: float
    """Seconds of a planned micro-batch; 0 before the first one."""
    left: float
    """Micro-batches that are left; infinite where the run has no end."""

    @property
    def earned(self) -> float:
        """The most seconds that plans can save in what is left."""
        return SAVED * self.step_seconds * self.left

    @property
    def goes_on(self) -> bool:
        """Whether captures now take longer than the steps that they are for."""
        each = self.seconds / max(1, self.captures)
        return self.recent * each > RECENT * self.step_seconds


def why_too_costly(costs: CaptureCosts) -> str:
    """Say why the run should go on without plans; empty if it should not."""
    if costs.captures < LEAST or not costs.goes_on:
        return ""
    if costs.captures < MOST and costs.seconds <= costs.earned:
        return ""
    return (
        f"its batches differ so often that graphs were captured {costs.captures} times, which took"
        f" {costs.seconds:.1f} s, and {costs.recent} of the last {RECENT} micro-batches needed"
        f" another one. A micro-batch takes {costs.step_seconds * 1e3:.3g} ms, and {_left(costs)}."
        " Return batches of a few shapes, or give a budget, with which plans save memory"
    )


def _left(costs: CaptureCosts) -> str:
    if costs.left == float("inf"):
        return "without a budget a plan saves a tenth of that at most"
    return (
        f"in the {costs.left:,.0f} that are left plans without a budget save"
        f" {costs.earned:.1f} s at most"
    )


class CaptureTally:
    """Counts the captures of one fit."""

    def __init__(self) -> None:
        self._captures, self._seconds = 0, 0.0
        self._recent: deque[bool] = deque(maxlen=RECENT)

    def found(self) -> None:
        """Note a micro-batch whose graph was there."""
        self._recent.append(False)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the capture that is made in this block."""
        log.info("capturing and planning a step")
        begun = monotonic()
        yield
        self._recent.append(True)
        self._captures += 1
        self._seconds += monotonic() - begun

    def check(self, spent: TimeSpent, left: float) -> None:
        """Raise `CaptureError` before a capture that had better not be made. `spent`: by all steps
        so far; `left`: so many micro-batches."""
        recent, each = sum(self._recent), spent.seconds / max(1, spent.runs)
        costs = CaptureCosts(self._captures, self._seconds, recent, each, left)
        if why := why_too_costly(costs):
            raise CaptureError(why)
