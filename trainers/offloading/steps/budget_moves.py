"""Moves of a training to another budget: planned ahead by whoever asks, made between two steps.

    any thread    | move_to(budget): plan ............ |     done.result()
    the training  | step | step | step | step | step   | the transfer | step of the new plan

Only the transfer is in the training's way. A move that has no room leaves the old plan as it is.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from lightning_utilities.core.rank_zero import rank_zero_warn

from offload import MemoryTooSmall, OffloadError, Plan
from offload.running.runner_memory import Migration
from trainers.offloading.plan_request import PlanRequest
from trainers.offloading.steps.movable_steps import MovableSteps, replanned


@dataclass(frozen=True, slots=True, eq=False)
class PlannedMove:
    """A move that waits for the next step."""

    request: PlanRequest
    before: Plan
    """The plan whose graph was planned again."""
    plan: Plan
    done: Future[Migration] = field(default_factory=Future)


class BudgetMoves:
    """The moves of one strategy that wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[PlannedMove] = []

    def plan(self, steps: MovableSteps | None, request: PlanRequest) -> Future[Migration]:
        """Plan the steps anew, and have them move before the next one begins."""
        before = steps.plan if steps is not None else None
        if before is None:
            raise OffloadError(
                "move_to() comes before the first step, so there is no plan to move from: give the"
                " budget to the strategy, or call it from the second step on"
            )
        move = PlannedMove(request, before, replanned(request, before))
        move.done.set_running_or_notify_cancel()  # nobody can cancel it
        with self._lock:
            self._waiting.append(move)
        return move.done

    def make(self, steps: MovableSteps, now: PlanRequest) -> PlanRequest:
        """Make the moves that wait. `now`: the request of the present plan. Returns that of the
        last move that was made."""
        while move := self._next():  # one that raises leaves those after it to `end`
            request = replace(now, budget=move.request.budget)
            if self._made(steps, move, request):
                now = request
        return now

    def _next(self) -> PlannedMove | None:
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def _made(self, steps: MovableSteps, move: PlannedMove, request: PlanRequest) -> bool:
        try:
            assert steps.plan is not None
            plan = move.plan
            if steps.plan.source is not move.before.source:
                plan = replanned(request, steps.plan)  # another plan has come meanwhile
            move.done.set_result(steps.move(request, plan))
            return True
        except MemoryTooSmall as error:
            rank_zero_warn(f"OffloadStrategy keeps its budget, because it cannot move: {error}")
            move.done.set_exception(error)
        except BaseException as error:
            move.done.set_exception(error)
            raise
        return False

    def end(self) -> None:
        """No step comes any more."""
        with self._lock:
            moves, self._waiting = self._waiting, []
        for move in moves:
            move.done.set_exception(
                OffloadError("the run ended before the step that would have moved: nothing moved")
            )
