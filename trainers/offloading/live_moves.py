"""Moves of a training to another budget or device: planned by whoever asks, made between two steps.

    any thread    | move_to(): plan ............ |     done.result()
    the training  | step | step | step | step    | the transfer | step there

Only the transfer is in the training's way. A move that has no room leaves everything as it is.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from lightning_utilities.core.rank_zero import rank_zero_warn

from offload import BudgetTooSmall, DeviceLost, MemoryTooSmall, OffloadError, Plan
from offload.running.runner_memory import Migration
from trainers.offloading.hardware.target import Target
from trainers.offloading.plan_request import PlanRequest

SAME = "same"
"""As a budget: the present one."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveMove:
    """A move that waits for the next step."""

    budget: str | int | None
    target: Target | None
    """None: the present one."""
    before: Plan | None = None
    """The plan whose graph was planned again; None if there was none just then."""
    plan: Plan | None = None
    done: Future[Migration] = field(default_factory=Future)

    def asked(self, now: PlanRequest) -> PlanRequest:
        """Return what is asked for, if the run is asked for this now. Another move may have come
        before."""
        budget = now.budget if self.budget == SAME else self.budget
        return replace(now, budget=budget, target=self.target or now.target)


class LiveMoves:
    """Those of one strategy. They are made in the order in which they were asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[LiveMove] = []

    def add(self, move: LiveMove) -> Future[Migration]:
        move.done.set_running_or_notify_cancel()  # nobody can cancel it
        with self._lock:
            self._waiting.append(move)
        return move.done

    def next(self) -> LiveMove | None:
        """The one that comes next, which nobody else gets."""
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    @contextmanager
    def refusing(self, move: LiveMove) -> Iterator[None]:
        """If there is no room for the move that this block makes, or no plan, the training goes on
        where it is. Any other error ends it."""
        try:
            yield
        except BaseException as error:
            move.done.set_exception(error)
            refused = isinstance(error, BudgetTooSmall | MemoryTooSmall)
            if not refused or isinstance(error, DeviceLost):
                raise
            rank_zero_warn(f"OffloadStrategy stays where it is, because it cannot move: {error}")

    def end(self) -> None:
        """No step comes any more."""
        while move := self.next():
            move.done.set_exception(
                OffloadError("the run ended before the step that would have moved: nothing moved")
            )
