"""Steps that are over for Python, and whose kernels still run: one at a time.

loop's thread    | step 7, on shadows | step 8, on shadows      | land | ...
kernels' thread                       | step 7's kernels ............. | step 8's kernels

A step lands at the next one's end, or where somebody needs it: looks at what its kernels write,
draws while they draw, forks a process. What they read is theirs alone: weights are barred, and
what the step was given is copied, for any thread may write that.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import distributed

from offload.live.kernel_thread import KernelThread, wait_for
from offload.live.planned_tapes import PlannedRun

LOOKS, PAUSE = 8, 100
"""Where somebody has looked at so many steps in a row before the next one's end, so many steps do
not fly: nothing overlaps, and another thread costs time."""


@dataclass(frozen=True, slots=True)
class Flight:
    """Of one step. `dropped` and `stay`: slots, as `over` of the core takes them."""

    run: PlannedRun
    made: "Future[Any]"
    dropped: set[int]
    stay: set[int]


class Flights:
    """Those of a session."""

    def __init__(self, core: Any, thread: Callable[[], KernelThread], allowed: bool) -> None:
        self._core = core
        self._thread = thread
        self._allowed = allowed
        self._lock = threading.Lock()
        """Held by whoever lets a step fly, or forbids it."""
        self._flight: Flight | None = None
        self._looks, self._pause = 0, 0
        self.failed = False
        """Whether kernels have raised after the end of their step."""

    def begin(
        self, ready: Callable[[], PlannedRun | None], dropped: set[int], stay: set[int]
    ) -> bool:
        """Let the kernels of a step run on while Python goes on, if they have a plan. False: they
        have not begun."""
        if self._pause:
            self._pause -= 1
            return False
        with self._lock:
            if not self._allowed or _has_ranks():
                return False
            run = ready()
            if run is None or not run.is_bound:
                return False
            self._core.take_off(run.tape)
            self._flight = Flight(run, self._thread().begin(run.compute), dropped, stay)
        return True

    def look(self) -> None:
        """Land, because somebody needs the step before the next one's end."""
        if self._flight is None:
            return
        self._looks += 1
        if self._looks >= LOOKS:
            self._pause = PAUSE
        self.land()

    def land(self, *, in_time: bool = False) -> None:
        """Wait for the kernels of the latest step, if they still run. An error of theirs is raised
        here. `in_time`: at the next step's end."""
        if (flight := self._flight) is None:
            return
        if in_time:
            self._looks = 0
        try:
            wait_for(flight.made)
        finally:
            self._flight = None
            self._core.landed()
            try:
                flight.run.finish(flight.made.result())
            except BaseException:
                self.failed = True
                flight.run.tape.over(set(), set())
                raise
            flight.run.tape.over(flight.dropped, flight.stay)

    def rest(self) -> None:
        """Wait until no kernel runs. Any thread may call this."""
        if (flight := self._flight) is not None:
            wait_for(flight.made)

    def forbid(self) -> None:
        """Let no kernels run beside Python any more. Any thread may call this."""
        with self._lock:
            self._allowed = False
        self.rest()


def _has_ranks() -> bool:
    """Whether other processes expect an order of collectives: then Python may not overtake one."""
    return distributed.is_available() and distributed.is_initialized()


@cache
def land_before_forks(core: Any) -> None:
    """Where a process is forked, no kernel of the thread that forks runs: the child would inherit
    locks that nobody releases."""
    os.register_at_fork(before=core.land)
