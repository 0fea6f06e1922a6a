"""Moves of a training to another budget: planned ahead by whoever asks, made between two steps.

    any thread    | move_to(budget): plan ............ |     done.result()
    the training  | step | step | step | step | step   | the transfer | step of the new plan

Only the transfer is in the training's way. A move that has no room leaves the old plan as it is.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from lightning_utilities.core.rank_zero import rank_zero_warn

from offload import BudgetTooSmall, MemoryTooSmall, OffloadError, Plan
from offload.running.runner_memory import Migration
from trainers.offloading.steps.plan_request import PlanRequest
from trainers.offloading.steps.step_graphs import StepGraphs


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

    def plan(self, steps: StepGraphs | None, request: PlanRequest) -> Future[Migration]:
        """Plan the steps anew, and have them move before the next one begins."""
        before = steps.plan if steps is not None else None
        if before is None:
            raise OffloadError(
                "move_to() comes before the first step, so there is no plan to move from: give the"
                " budget to the strategy, or call it from the second step on"
            )
        move = PlannedMove(request, before, _planned(request, before))
        with self._lock:
            self._waiting.append(move)
        return move.done

    def make(self, steps: StepGraphs) -> PlanRequest | None:
        """Make the moves that wait. Returns the request of the last one that was made."""
        with self._lock:
            moves, self._waiting = self._waiting, []
        made: PlanRequest | None = None
        for move in moves:
            if self._made(steps, move):
                made = move.request
        return made

    def _made(self, steps: StepGraphs, move: PlannedMove) -> bool:
        try:
            assert steps.plan is not None
            plan = move.plan
            if steps.plan.source is not move.before.source:
                plan = _planned(move.request, steps.plan)  # another plan has come meanwhile
            move.done.set_result(steps.move(move.request, plan))
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


def _planned(request: PlanRequest, before: Plan) -> Plan:
    """Plan the same graph with another budget, and with what is known of its times."""
    known = replace(request, target=replace(request.target, costs=before.costs))
    if before.rotation is None:
        return known.plan(before.source)
    plan = known.plan(before.source, late=True)
    if plan.rotation is not None:
        try:
            for graph in (before.source, plan.rotation.first, plan.rotation.flush):
                plan.replan(graph)
        except BudgetTooSmall:  # no update can be deferred in this budget
            return known.plan(before.source)
    return plan
