"""The graphs of a fit, which can go on in another budget or on another device.

    here     step | step | capture_ahead() | step                |
    there                  the same step, captured and planned   | take_over(here) | step | step

What is captured belongs to one device, so each device has a version of the steps. The tensors and
the runner go from version to version. The version that was left is kept, with its plan.
"""

from dataclasses import replace
from typing import Any

from offload import BudgetTooSmall, Plan
from offload.running.runner_memory import Migration
from trainers.offloading.plan_request import PlanRequest
from trainers.offloading.steps.micro_batch import MicroBatch
from trainers.offloading.steps.step_graphs import StepGraphs
from trainers.offloading.tracing.batch_parts import BatchParts


class MovableSteps(StepGraphs):
    """One version of the steps. Its runner may come from another version."""

    _whole: Any = None
    """The step of `plan`, if that is one without other micro-batches: captured ahead, or left."""

    @property
    def request(self) -> PlanRequest:
        """The wishes that its plan was made for."""
        return self._request

    def move(self, request: PlanRequest, plan: Plan) -> Migration:
        """Go on with this plan of the same step, made for this request."""
        assert self.plan is not None
        return self._go_to(request, plan, self._step_of_plan(), self)

    def capture_ahead(self, micro: MicroBatch, parts: BatchParts, request: PlanRequest) -> None:
        """Capture and plan the step of this micro-batch, which is the first of its optimizer step.
        No tensor moves. What a version has from before is used again."""
        if self.plan is not None:
            if request != self._request:
                self.plan = replanned(request, self.plan)
            self._request = request
            return
        with self.planning():
            step = self._traced(micro, parts, micro.last, self.held)
            plan = self._first_plan(self._whole_step(micro, parts, step))
            self.plan = with_room_for_late(plan, request)
        if micro.last:
            self._whole = step
            self._cache.put(self._key(micro, parts), step)

    def take_over(self, before: "MovableSteps") -> Migration:
        """Go on with the tensors and the runner of another version, whose steps end here. Raises
        `MemoryTooSmall` if there is no room; then nothing has moved."""
        assert self.plan is not None
        before._whole = before._step_of_plan()
        return self._go_to(self._request, self.plan, self._whole, before)

    def _let_go(self) -> None:
        """Another version has the runner now."""
        self.runner = None
        self._plans.clear()

    def _step_of_plan(self) -> Any:
        return next((key for key, known in self._plans.items() if known is self.plan), None)

    def _go_to(
        self, request: PlanRequest, plan: Plan, step: Any, before: "MovableSteps"
    ) -> Migration:
        runner, stays, rotation = before.runner, before is self, plan.rotation
        assert runner is not None
        before.late_updates.flush()
        with self.planning():
            key = step if rotation is None else self.late_updates.key(step)
            if stays:
                moved = runner.move_to(plan, key)
            else:
                stage = request.target.stage(plan)
                try:
                    moved = runner.move_to(plan, key, stage, owned=True)
                except BaseException:
                    stage.close()
                    raise
            before.late_updates.end()
            before._let_go()
            self.runner = runner
            if rotation is not None:
                self.late_updates.begin(runner, rotation, step, plan.source)
        about = step and (self._meter.about(step) if stays else step.about)
        self._request, self.plan = request, plan
        self._plans.clear()
        if step is not None:
            self._note_plan(step, plan, *about)
        return moved


def replanned(request: PlanRequest, before: Plan) -> Plan:
    """Plan the same graph with another budget, and with what is known of its times."""
    known = replace(request, target=replace(request.target, costs=before.costs))
    if before.rotation is None:
        return known.plan(before.source)
    return with_room_for_late(known.plan(before.source, late=True), known)


def with_room_for_late(plan: Plan, request: PlanRequest) -> Plan:
    """Return this plan, or one that defers no update if there is no room for deferred ones."""
    if plan.rotation is not None:
        try:
            for graph in (plan.source, plan.rotation.first, plan.rotation.flush):
                plan.replan(graph)
        except BudgetTooSmall:
            return request.plan(plan.source)
    return plan
