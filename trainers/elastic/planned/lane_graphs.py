"""The graphs of one peer, over the same tensors in one runner: lanes, and the update.

    lane of 8 samples --key--> a graph that adds its gradients to the sums; captured once
    several of these  -------> a group: their graphs in turn (group_choice.py says how many)
    lane of 3 samples --key--> another one: the last lanes of a pass may be smaller
    commit            --key--> a graph that divides the totals, clips and updates

Which lanes fall to this peer is no part of a key, and the size of a group stays as it is, so
another deal captures nothing anew. The first plan is one of a group or a lane beside the others, so
it places all tensors. A newcomer applies commits before it has a lane: it plans the update alone,
and leaves that plan at its first whole lane.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from offload import BudgetTooSmall, OffloadError, Plan, Runner, TaskGraph
from offload.measuring.fake_answers import Learned
from offload.optimizer.fixed_settings import fixed_settings
from offload.sizes import is_share
from offload.torch_seams import hook_keys, mark_stepped
from offload.tracing.capture import capture_step, capture_update_step, retraced_step
from offload.tracing.fixed_at_capture import torch_settings
from offload.tracing.training import Parameter, TrainingStep
from offload.tracing.updating import Clip
from trainers.elastic.planned.group_choice import chosen
from trainers.elastic.planned.host_sums import HostSums
from trainers.elastic.planned.lane_graph import LaneGraph, LaneGroup
from trainers.offloading.steps.graph_cache import GraphCache, shapes_of
from trainers.offloading.steps.graph_validity import GraphValidity, Retraced
from trainers.offloading.steps.plan_request import PlanRequest
from trainers.offloading.steps.unwatched import Unwatched
from trainers.offloading.tracing.batch_parts import BatchParts
from trainers.offloading.tracing.closure import StepArguments, TrainingForward
from trainers.offloading.tracing.hooks import Hooks

log = logging.getLogger(__name__)

Traced = TypeVar("Traced")


class LaneGraphs:
    """Captures, plans and runs the lanes and the updates of one fit."""

    def __init__(
        self,
        module: L.LightningModule,
        optimizer: Optimizer,
        request: PlanRequest,
        sums: HostSums,
        why_alone: str = "",
    ) -> None:
        """`why_alone`: why lanes cannot run in groups; empty if they may."""
        self.plan: Plan | None = None
        """The plan that places all tensors."""
        self.runner: Runner | None = None
        self.captures = 0
        """The number of graphs that were captured."""
        self.group_size = 1
        """So many lanes run together where they can. It is chosen at the first whole lane."""
        self._module = module
        self._optimizer = optimizer
        self._request = request
        self._sums = sums
        self._cache: GraphCache[LaneGraph] = GraphCache("the lane", self._forget)
        self._groups: dict[LaneGraph, LaneGroup | None] = {}
        """The group of each graph; None where it cannot be planned."""
        self._why_alone = why_alone
        self._updates: dict[Hashable, TaskGraph] = {}
        self._added: set[Hashable] = set()
        """The keys that are in the runner."""
        self._has_lane = False
        """Whether the runner's plan is one of whole lanes."""
        self._learned = Learned(request.cache)
        self._unwatched = Unwatched("ElasticStrategy", "not found")

    # ---- lanes ----------------------------------------------------------------------------------

    def lane_for(self, given: StepArguments, share: float, lanes: int) -> LaneGraph:
        """Return the graph of such a lane, and capture it if there is none. `share`: by how much
        its loss is multiplied, because it has fewer samples than others. `lanes`: so many this
        peer has in the step."""
        key = (given.batch.key, share, *self._situation())
        found = self._cache.find(key)
        if found is None:
            found = self._cache.renewed(key, lambda: self._retraced(given, share))
        if found is not None:
            return found
        self._cache.warn_if_many(key, given.batch, self._module.current_epoch)
        found = self._captured(given, share)
        if not self._has_lane:
            self._begin(found, lanes, is_whole=share == 1.0)
        self._cache.put(key, found)
        return found

    def run(self, lane: LaneGraph, parts: BatchParts) -> Sequence[Any]:
        """Add the gradients of a lane to the sums. Return the outputs besides the loss."""
        _, *outputs = self._run(lane, lane.graph, parts.tensors)
        self._sums.touch(lane.touched)
        return outputs

    def group_of(self, lane: LaneGraph) -> LaneGroup | None:
        """Return the group of lanes of this graph; None if it cannot be planned."""
        if lane not in self._groups:
            self._groups[lane] = self._joined(lane)
        return self._groups[lane]

    def run_group(
        self, group: LaneGroup, parts: Sequence[BatchParts], seeds: Sequence[int]
    ) -> list[Sequence[Any]]:
        """Add the gradients of several lanes to the sums, in their order. `seeds`: of what each of
        them draws. Return the outputs of each besides its loss."""
        for dice, seed in zip(group.draws, seeds, strict=True):
            dice.manual_seed(seed)
        tensors = [tensor for one in parts for tensor in one.tensors]
        outputs = group.outputs_by_lane(self._run(group, group.graph, tensors))
        self._sums.touch(group.lane.touched)
        return [own for _, *own in outputs]

    def _run(self, key: Hashable, graph: TaskGraph, tensors: Sequence[Tensor]) -> Sequence[Any]:
        assert self.runner is not None
        if key not in self._added:
            self.runner.add(key, graph)
            self._added.add(key)
        return self.runner.run(key, *tensors)

    def _begin(self, lane: LaneGraph, lanes: int, *, is_whole: bool) -> None:
        """Make the plan that places all tensors, and the runner of all steps."""
        self.close()
        touched = tuple(p for p in self._sums.sums if p in lane.touched)
        _, update = self._update_of(touched)
        why = self._why_alone if is_whole else "this one is smaller than others"
        choice = chosen(lane, update, lanes, self._request, why_alone=why)
        choice.plan.remarks.say(choice.why)
        log.info("%s", choice.why)
        key = choice.group or lane
        self.plan, self.runner = choice.plan, self._request.target.runner(choice.plan, key)
        self._added.add(key)
        self._has_lane = is_whole
        if choice.group is not None:
            self.group_size = choice.group.size
            self._groups[lane] = choice.group

    def _joined(self, lane: LaneGraph) -> LaneGroup | None:
        """Join lanes of another graph than that for which the size was chosen."""
        assert self.runner is not None and self.plan is not None
        try:
            group = LaneGroup.of(lane, self.group_size)
            self.runner.add(group, group.graph)
        except OffloadError as error:
            self.plan.remarks.say(f"other lanes run one by one: {error}")
            return None
        self._added.add(group)
        return group

    def _captured(self, given: StepArguments, share: float) -> LaneGraph:
        forward, graph = self._traced(capture_step, given, share)
        self._count(f"a lane of {shapes_of(given.batch.key)}")
        self._sums.check_whole()
        self._unwatched.say(forward.reads)
        there = {id(tensor) for tensor in graph.program.tensors.values()}
        touched = frozenset(p for p, total in self._sums.sums.items() if id(total) in there)
        return LaneGraph(GraphValidity(forward.recipe(), graph.program.sketch), graph, touched)

    def _retraced(self, given: StepArguments, share: float) -> Retraced:
        """Trace the lane once, without capturing it."""
        forward, sketch = self._traced(retraced_step, given, share)
        return Retraced(sketch, forward.recipe())

    def _traced(
        self, trace: Callable[..., Traced], given: StepArguments, share: float
    ) -> tuple[TrainingForward, Traced]:
        """Return the forward pass of a lane, and what its step is traced to."""
        hooks = Hooks(self._module, self._optimizer)
        forward = TrainingForward(self._module, given, hooks)

        def weighted(*tensors: Tensor) -> tuple[Tensor, Any]:
            loss, more = forward(*tensors)
            return loss if share == 1.0 else loss * share, more

        sums = self._sums.sums
        # Every lane adds to its sum, the first one too: 0 + g has another sign than g where g is
        # -0.0, and the bits must be those of a peer without a plan.
        step = TrainingStep(
            weighted, self._optimizer, hooks.reaches(), False, sums, frozenset(sums)
        )
        device, reads = self._request.target.device, forward.reads
        with torch.enable_grad():
            traced = trace(
                step, *given.batch.tensors, device=device, reads=reads, learned=self._learned
            )
        return forward, traced

    def _situation(self) -> tuple[Any, ...]:
        return (
            torch_settings(),
            torch.is_autocast_enabled(self._request.target.device.type),
            tuple([p.requires_grad for p in self._module.parameters()]),
            hook_keys(self._module.parameters()),
            fixed_settings(self._optimizer),
        )

    # ---- the update -----------------------------------------------------------------------------

    def update(self, total: Tensor, touched: str, count: float) -> None:
        """Divide a flat total by `count`, clip the gradients of those parameters that `touched`
        names, and update these."""
        parameters = self._sums.named(touched)
        if not parameters:
            mark_stepped(self._optimizer)
            return
        key, graph = self._update_of(parameters)
        if self.runner is None:
            self.plan = self._plan_alone(graph)
            self.runner = self._request.target.runner(self.plan, key)
            self._added.add(key)
        self._sums.scatter(total)
        self._run(key, graph, [torch.tensor(count, dtype=torch.float64)])

    def _update_of(self, parameters: tuple[Parameter, ...]) -> tuple[Hashable, TaskGraph]:
        clip = self._clip()
        key = (tuple(map(id, parameters)), clip, *self._situation())
        if key not in self._updates:
            totals = {p: self._sums.totals[p] for p in parameters}
            self._updates[key] = capture_update_step(
                self._module, self._optimizer, totals, clip, device=self._request.target.device
            )
            self._count(f"an update of {len(parameters)} parameters")
        return key, self._updates[key]

    def _count(self, what: str) -> None:
        self.captures += 1
        log.info("captured %s", what)

    def _plan_alone(self, graph: TaskGraph) -> Plan:
        """Plan an update without a lane. A budget that is a share means a share of a lane, so here
        it is raised to what the update needs."""
        try:
            return self._request.plan(graph)
        except BudgetTooSmall as error:
            if not is_share(self._request.budget):
                raise
            return replace(self._request, budget=error.needed).plan(graph)

    def _clip(self) -> Clip | None:
        trainer = self._module.trainer
        if not trainer.gradient_clip_val or trainer.gradient_clip_val <= 0:
            return None
        by = trainer.gradient_clip_algorithm
        return Clip(float(trainer.gradient_clip_val), "norm" if by is None else str(by.value))

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all tensors memory of their own again. It is safe to call again."""
        runner, self.runner = self.runner, None
        self._added.clear()
        self._groups.clear()
        self._has_lane = False
        if runner is not None:
            runner.close()

    def _forget(self, lane: LaneGraph) -> None:
        for key in (lane, self._groups.pop(lane, None)):
            self._added.discard(key)
            if self.runner is not None and key is not None:
                self.runner.forget(key)
