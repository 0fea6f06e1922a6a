"""The lanes of a step, and its update, as plans within a byte budget.

    seed of (run, step, lane) -> buffers as committed -> the lane's graph -> sums
    seeds of several lanes    ->                      -> their group      -> sums, in their order
    commit -> totals -> the update's graph: total / count -> clip -> update

All else of a step is as without a budget (working/plain_work.py), with equal bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload import CaptureError, Plan, Runner
from trainers.elastic.commits.commit import Commit
from trainers.elastic.deciding.group_size import together
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.planned.host_sums import HostSums
from trainers.elastic.planned.lane_graph import LaneGraph
from trainers.elastic.planned.lane_graphs import LaneGraphs
from trainers.elastic.working.plain_work import AddedLane, PlainWork
from trainers.offloading.plan_request import PlanRequest
from trainers.offloading.tracing.batch_parts import BatchParts
from trainers.offloading.tracing.closure import CONTEXTS, StepArguments
from trainers.offloading.tracing.refusals import user_error
from trainers.offloading.tracing.side_effects import LogCall, say

STEP = "training_step"


@dataclass(frozen=True, slots=True, eq=False)
class _TakenLane:
    """A lane with its batch on the device."""

    lane: int
    size: int
    parts: BatchParts


class PlannedWork(PlainWork):
    """One peer's. It implements `Work` (commits/commit.py)."""

    def __init__(
        self, *args: Any, request: PlanRequest, takes_index: bool, exact: bool = False
    ) -> None:
        """`args`: those of `PlainWork`. `takes_index`: whether the step takes `batch_idx`."""
        super().__init__(*args, exact=exact)
        self._request = request
        self._takes_index = takes_index
        assert isinstance(self.gradients, HostSums)
        why_alone = "sum='exact' rounds the gradients of each lane by themselves" if exact else ""
        self.graphs = LaneGraphs(self._module, self._optimizer, request, self.gradients, why_alone)
        self._taken: dict[int, _TakenLane] = {}
        """Lanes of this step that are not yet computed, though their batches are here."""

    @property
    def plan(self) -> Plan | None:
        """The plan of a lane, or of several in turn, beside the update. It exists after the first
        lane."""
        return self.graphs.plan

    @property
    def runner(self) -> Runner | None:
        return self.graphs.runner

    def close(self) -> None:
        self.graphs.close()

    def begin(self, step: int) -> None:
        super().begin(step)
        self._taken.clear()

    def apply_commit(self, commit: Commit) -> None:
        """Clip the commit's mean gradient and update with it, and put its buffers in place."""
        try:
            self.graphs.update(commit.total, commit.logs.touched, commit.logs.samples / self._micro)
        except CaptureError as error:
            raise self._refused(error) from error
        self._put_buffers(commit.buffers)

    # ---- details --------------------------------------------------------------------------------

    def _make_sums(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> HostSums:
        return HostSums(named)

    def _add_first(self, lanes: Sequence[int]) -> Sequence[AddedLane]:
        first = self._lanes_with_samples[0]
        count = together(lanes, self._sizes, self._micro, first, self.graphs.group_size)
        try:
            taken = [self._take(lane) for lane in lanes[:count]]
            graph = self._graph_of(taken[0], len(lanes))
        except CaptureError as error:
            if mistake := user_error(error):
                raise mistake from None
            raise self._refused(error) from error
        alike = count > 1 and all(one.parts.key == taken[0].parts.key for one in taken)
        group = self.graphs.group_of(graph) if alike else None
        if group is None:
            taken = taken[:1]
            self._roll(self._seed_of(lanes[0]))  # a capture may have drawn
            outputs = [self.graphs.run(graph, taken[0].parts)]
        else:
            seeds = [self._seed_of(one.lane) for one in taken]
            outputs = self.graphs.run_group(group, [one.parts for one in taken], seeds)
        for one in taken:
            del self._taken[one.lane]
        return [self._added(graph, one, own) for one, own in zip(taken, outputs, strict=True)]

    def _take(self, lane: int) -> _TakenLane:
        if lane not in self._taken:
            taken = self._lanes.take(lane)
            parts = BatchParts.of(self._on_device(taken.batch))
            self._taken[lane] = _TakenLane(lane, len(taken.info.ids), parts)
        return self._taken[lane]

    def _graph_of(self, taken: _TakenLane, lanes: int) -> LaneGraph:
        index = self._batch_index if self._takes_index else None
        given = StepArguments(STEP, taken.parts, index)
        return self.graphs.lane_for(given, taken.size / self._micro, lanes)

    def _added(self, graph: LaneGraph, taken: _TakenLane, outputs: Sequence[Any]) -> AddedLane:
        """Make the log calls of a lane."""
        given = taken.parts.given
        with self.catcher.catching(taken.size), self._context():
            say([self._caught(call) for call in graph.recipe.calls], outputs, given)
        loss = graph.recipe.loss(outputs, given)
        return AddedLane(taken.lane, taken.size, float(loss.detach()))

    def _context(self) -> Any:
        return getattr(self._module.trainer.precision_plugin, CONTEXTS[STEP])()

    def _caught(self, call: LogCall) -> LogCall:
        """Have a call of `self.log` go to the catcher, which stands in for it now."""
        return replace(call, function=self._module.log) if call.name == "self.log" else call

    def _refused(self, error: CaptureError) -> CannotBeElastic:
        return CannotBeElastic(
            f"budget={self._request.budget!r}: this run cannot be planned: {error}. Without a plan"
            " no budget can be kept: change what is named, or leave out budget="
        )
