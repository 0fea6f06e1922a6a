"""The graphs of a fit, one per situation, over the same tensors in one runner.

    batch, first / middle / last micro-batch, ...  --key-->  a step in the runner, or capture one

The first plan is one of a whole step with its update, so it places all tensors. Graphs that are
added later use them where they are.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from offload import MemoryTooSmall, Plan, Runner, TaskGraph
from offload.measuring.fake_answers import Learned
from offload.program.assumptions import Number
from offload.running.trace import Trace
from offload.tracing.capture import capture_step, retraced_step
from offload.tracing.questions import AssumedValues
from offload.tracing.ranks import Ranks
from offload.tracing.training import Parameter, TrainingStep
from trainers.offloading.hardware.meter import Meter
from trainers.offloading.plan_request import PlanRequest
from trainers.offloading.steps.answers import Answers, why_not_late
from trainers.offloading.steps.audit import AuditSchedule, at_edge, in_doubt
from trainers.offloading.steps.capture_costs import CaptureTally
from trainers.offloading.steps.graph_cache import GraphCache, shapes_of
from trainers.offloading.steps.graph_validity import GraphValidity, Retraced
from trainers.offloading.steps.late_updates import LateUpdates
from trainers.offloading.steps.micro_batch import (
    MicroBatch,
    StepGraph,
    clip_of,
    micro_batches_left,
    outside,
    situation_of,
)
from trainers.offloading.steps.unwatched import Unwatched
from trainers.offloading.tracing.batch_parts import BatchParts, NamesRead
from trainers.offloading.tracing.closure import StepArguments, TrainingForward
from trainers.offloading.tracing.hooks import Hooks
from trainers.offloading.tracing.step_traits import StepTraits

TRIAL_RUNS = 4
"""After so many runs the first plan is compared with a plan made from their measured times."""


class StepGraphs:
    """Captures, plans and runs the graphs of one fit."""

    def __init__(
        self,
        module: L.LightningModule,
        optimizer: Optimizer,
        request: PlanRequest,
        meter: Meter,
        ranks: Ranks | None = None,
        audit: float = 0.0,
    ) -> None:
        """`audit`: the part of the time that audits of the graphs may take."""
        self.sums: dict[Parameter, torch.Tensor] = {}
        """The sums of the gradients of the micro-batches so far."""
        self.plan: Plan | None = None
        self._module = module
        self.optimizer = optimizer
        self._request = request
        self._meter = meter
        self._ranks = ranks
        self._audits = AuditSchedule(audit)
        self.runner: Runner | None = None
        """The runner of all graphs, which is made after the first capture."""
        self.late_updates = LateUpdates(module)
        self._plans: dict[Any, Plan] = {}
        """Of all graphs that are in the runner now."""
        self._cache: GraphCache[StepGraph] = GraphCache("the step", self._forget)
        self._first_traces: list[Trace] | None = []
        """The traces of the first plan's runs. None: the first plan is no longer compared."""
        self._learned = Learned(request.cache)
        self._captures = CaptureTally()
        self._traits = StepTraits()
        self._names = NamesRead("training_step")
        self.answers = Answers()
        """What failed checks have told of the present micro-batch."""
        self._unwatched = Unwatched("OffloadStrategy", "only found by audits")
        self.held: frozenset[Parameter] = frozenset()
        """The parameters whose sum holds something now."""
        self.just_held: frozenset[Parameter] = frozenset()
        """The parameters whose sum must equal an eager run's `.grad` after this micro-batch."""

    by_hand = False  # whether the steps optimize by hand

    def hold(self, held: frozenset[Parameter]) -> None:
        self.held = held

    def _begin(self, micro: MicroBatch) -> None:
        if micro.first:
            self.held = frozenset()

    def known(self, micro: MicroBatch, parts: BatchParts) -> StepGraph | None:
        """Return the graph that was captured for such a micro-batch, if there is one."""
        self._begin(micro)
        parts = self._names.of(parts)
        found = self._cache.find(key := self._key(micro, parts), self.answers.fit)
        if found is None:
            if not self.answers.known:
                found = self._cache.renewed(key, lambda: self._retraced(micro, parts))
        elif self._audits.due(at_edge(self._module.trainer)):
            self._audit(found, micro, parts)
        return found

    def step_for(self, micro: MicroBatch, parts: BatchParts) -> StepGraph:
        """Return the graph for this micro-batch, and capture it if there is none."""
        if found := self.known(micro, parts):
            self._captures.found()
            return found
        if self._ranks is None and self._request.may_go_eager:
            self._captures.check(self._meter.spent, micro_batches_left(self._module.trainer))
        read, now = self._names.of(parts), self._module.current_epoch
        self._cache.warn_if_many(self._key(micro, read), read, now, self.answers.surprise)
        self.late_updates.flush()
        with self._meter.planning(), self._captures.counted():
            step = self._names.capture(parts, lambda read: self._capture(micro, read))
        self._cache.put(self._key(micro, self._names.of(parts)), step)
        return step

    def _audit(self, step: StepGraph, micro: MicroBatch, parts: BatchParts) -> None:
        """Trace the step once more, although nothing that is watched has changed."""
        begun, before = monotonic(), self._audits.last
        with self._meter.planning():
            why = step.validity.difference(self._retraced(micro, parts, step.assumed))
        self._audits.done(monotonic() - begun)
        if why:
            raise in_doubt(why, before, self._audits.count)

    def plan_for(self, micro: MicroBatch, parts: BatchParts) -> Plan:
        """Return the plan of the whole step that `step_for` would make, without running it."""
        step = self._traced(micro, parts, micro.last, self.held)
        whole = self._whole_step(micro, parts, step)
        found = self.plan.replan(whole) if self.plan else self._first_plan(whole)
        self.plan = self.plan or found
        if not micro.last:
            self.plan.replan(step.graph)  # raises if the micro-batch does not fit
        return found

    def run(self, step: StepGraph, parts: BatchParts, wait: bool = False) -> Sequence[Any]:
        """Run the step, and return its outputs besides the loss. `wait`: its last updates may be
        deferred to the next step."""
        assert self.runner is not None
        self.plan_of(step)
        self.runner.measure(self._meter.wants_times(step))
        begun = self._meter.begin()
        with self.answers.told(step, self._request.target.device):
            outputs = self.late_updates.run(self.runner, step, *parts.tensors, wait=wait)
        self._cache.ran(step)
        self._meter.ran(step, begun, self.runner.trace)
        self._remake(step)
        self.pass_over(step)
        self.just_held = frozenset() if step.last else step.holds
        return outputs if self.by_hand else outputs[1:]

    def run_as(self, key: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Run the graph that is in the runner by this key."""
        assert self.runner is not None
        self.late_updates.flush()
        self.runner.measure(self._meter.wants_times(key))
        begun = self._meter.begin()
        outputs = self.runner.run(key, *tensors)
        self._meter.ran(key, begun, self.runner.trace)
        return outputs

    def pass_over(self, step: StepGraph) -> None:
        """Note that this step has run or will: the next one adds its gradients to the sums."""
        self.held = step.holds

    # ---- other graphs over the same tensors -----------------------------------------------------

    def plan_of(self, step: StepGraph) -> Plan:
        if step not in self._plans:
            self.add(step, step.graph, *step.about)
        return self._plans[step]

    def add(self, key: Any, graph: TaskGraph, inputs: str, part: str) -> Plan:
        """Plan a graph and add it to the runner by this key."""
        assert self.runner is not None
        plan = self.runner.add(key, graph)
        assert isinstance(plan, Plan)
        self._note_plan(key, plan, inputs, part)
        return plan

    def settle_as(self, key: Any, plan: Plan, inputs: str, part: str) -> None:
        """Go on with this plan, which places all tensors from now on. Other steps are planned again
        when they are needed. Where there is no room for it, the old plan stays."""
        assert self.runner is not None
        self.late_updates.end()
        self.runner.move_to(plan, key)
        self._plans.clear()
        self.plan = plan
        self._note_plan(key, plan, inputs, part)

    def _remake(self, step: StepGraph) -> None:
        """Replace the first plan by a faster one that is planned with the measured times of its
        first runs. This happens once per fit, on a GPU only. It is left out if updates wait for the
        next step, because three graphs share that plan, and if there are several micro-batches,
        because the first plan itself does not run then."""
        trace = self.runner.trace if self.runner is not None else None
        plan = self._plans.get(step)
        if self._first_traces is None or trace is None or plan is None or plan is not self.plan:
            return
        if plan.rotation is not None or not self._request.target.measures:
            self._first_traces = None
            return
        if not (trace.whole and trace.timed and trace.memgraph is plan.memgraph):
            return
        self._first_traces.append(trace)
        if len(self._first_traces) < TRIAL_RUNS:
            return
        # The first run also loads kernels, so its times say nothing about later runs.
        traces, self._first_traces = self._first_traces[1:], None
        with self.planning():
            measured = plan.measured(traces)
            new = measured.remade()
            if new.memgraph is measured.memgraph:  # no faster plan was found: keep the runner
                self.plan = self._plans[step] = new
                self._meter.reprice(step, new)
                return
            self._note_waiting(new)
            try:
                self.settle_as(step, new, *step.about)
            except MemoryTooSmall as error:
                rank_zero_warn(
                    "OffloadStrategy keeps its first plan, because there is no memory for the"
                    f" faster one: {error}"
                )

    def planning(self) -> AbstractContextManager[None]:
        """Count the time of this block as planning and not as a step."""
        return self._meter.planning()

    def forget(self, key: Any) -> None:
        if self.runner is not None and self._plans.pop(key, None) is not None:
            self.runner.forget(key)
        self._meter.forget(key)

    def _note_plan(self, key: Any, plan: Plan, inputs: str, part: str) -> None:
        self._plans[key] = plan
        self._meter.add(key, plan, inputs, part)

    def give_gradients(self) -> None:
        """Copy the sums to `.grad`, because plain Lightning goes on with these micro-batches."""
        for p in self.held:
            p.grad = self.sums[p].to(p.device, copy=True)

    def close(self) -> None:
        if self.runner is not None:
            try:
                self.late_updates.end()
            finally:
                self.runner.close()

    def abandon(self) -> None:
        """Drop the runner without touching its device, which is lost."""
        if self.runner is not None:
            self.late_updates.abandon()
            self.runner.abandon()

    def _key(self, micro: MicroBatch, parts: BatchParts) -> tuple[Any, ...]:
        kind = self._request.target.device.type
        situation = situation_of(self._module, self.optimizer, kind)
        return (parts.key, micro.last, self.held, *situation)

    def _capture(self, micro: MicroBatch, parts: BatchParts) -> StepGraph:
        step = self._traced(micro, parts, micro.last, self.held)
        if self.runner is None:
            whole = self._whole_step(micro, parts, step)
            self.plan, self.runner = self._settle(whole, step if micro.last else None)
            if micro.last:
                self._note_plan(step, self.plan, *step.about)
                return step
        self.add(step, step.graph, *step.about)
        return step

    def _whole_step(self, micro: MicroBatch, parts: BatchParts, step: StepGraph) -> TaskGraph:
        """Return the graph of this micro-batch with an update."""
        return step.graph if micro.last else self._traced(micro, parts, True, step.holds).graph

    def _first_plan(self, whole: TaskGraph) -> Plan:
        """Plan the step, with updates deferred to the next step if that is allowed and faster."""
        why = why_not_late(whole) or self.late_updates.why_not()
        why = why or self._request.target.why_not_late
        plan = self._request.plan(whole, late=not why)
        self._note_waiting(plan)
        return plan

    def _note_waiting(self, plan: Plan) -> None:
        """If updates on the host are not deferred, remark the reason on the plan."""
        why = self.late_updates.why_not() or self._request.target.why_not_late
        if why and any(task.lane == "host" for task in plan.graph.tasks):
            plan.remarks.say(f"no update waits for the next forward pass: {why}")

    def _settle(self, whole: TaskGraph, step: StepGraph | None) -> tuple[Plan, Runner]:
        """Make the first plan and its runner."""
        plan = self._first_plan(whole)
        if plan.rotation is not None:
            runner = self._request.target.runner(plan, self.late_updates.key(step))
            if self.late_updates.begin(runner, plan.rotation, step, whole):
                return plan, runner
            runner.close()
            plan = self._request.plan(whole)
        return plan, self._request.target.runner(plan, step)

    def _traced(
        self, micro: MicroBatch, parts: BatchParts, last: bool, held: frozenset[Parameter]
    ) -> StepGraph:
        return self._traits.trace(lambda: self._traced_once(micro, parts, last, held))

    def _traced_once(
        self, micro: MicroBatch, parts: BatchParts, last: bool, held: frozenset[Parameter]
    ) -> StepGraph:
        forward, hooks, step = self._training_step(micro, parts, last, held)
        # Ranks cannot make a step again without the others.
        assumed = None if self._ranks else AssumedValues(self.answers.for_capture())
        with torch.enable_grad(), self._request.target.held():
            graph = capture_step(
                step,
                *parts.tensors,
                device=self._request.target.device,
                reads=forward.reads,
                learned=self._learned,
                assumed=assumed,
            )
        there = {id(source) for source in graph.program.tensors.values()}
        added = {p for p, total in self.sums.items() if id(total) in there}
        recipe = forward.recipe()
        self._unwatched.say(forward.reads)
        return StepGraph(
            GraphValidity(recipe, graph.program.sketch),
            held | added,
            last,
            hooks.zero,
            outside(graph, self._module, self.sums),
            graph,
            (shapes_of(parts.key), micro.part),
        )

    def _retraced(
        self, micro: MicroBatch, parts: BatchParts, assumed: Sequence[Number] = ()
    ) -> Retraced:
        """Trace the step of this micro-batch once, without capturing it. `assumed`: what it is
        answered if it asks for values; it is answered by their present ones after that."""
        return self._traits.trace(lambda: self._retraced_once(micro, parts, assumed))

    def _retraced_once(
        self, micro: MicroBatch, parts: BatchParts, assumed: Sequence[Number]
    ) -> Retraced:
        forward, _, step = self._training_step(micro, parts, micro.last, self.held)
        with torch.enable_grad(), self._request.target.held():
            sketch = retraced_step(
                step,
                *parts.tensors,
                device=self._request.target.device,
                reads=forward.reads,
                learned=self._learned,
                assumed=None if self._ranks else AssumedValues(assumed),
            )
        return Retraced(sketch, forward.recipe())

    def _training_step(
        self, micro: MicroBatch, parts: BatchParts, last: bool, held: frozenset[Parameter]
    ) -> tuple[TrainingForward, Hooks, TrainingStep]:
        hooks = Hooks(self._module, self.optimizer)
        forward = TrainingForward(
            self._module,
            StepArguments("training_step", parts, micro.batch_idx, (), self._traits),
            hooks,
        )
        step = TrainingStep(
            forward,
            self.optimizer,
            hooks.reaches(),
            last,
            self.sums,
            held,
            None if hooks.clip else clip_of(self._module.trainer),
            forward.after if hooks.after else None,
            self._ranks,
        )
        return forward, hooks, step

    def _forget(self, step: StepGraph) -> None:
        self.late_updates.forget(step)
        self.forget(step)
