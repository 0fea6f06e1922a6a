"""The lanes of a step, and its update, as plans within a byte budget.

    seed of (run, step, lane) -> buffers as committed -> the lane's graph -> sums
    commit -> totals -> the update's graph: total / count -> clip -> update

All else of a step is as without a budget (working/plain_work.py), with equal bits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload import CaptureError, Plan, Runner
from trainers.elastic.commits.commit import Commit
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.planned.host_sums import HostSums
from trainers.elastic.planned.lane_graphs import LaneGraphs
from trainers.elastic.working.plain_work import PlainWork
from trainers.offloading.steps.plan_request import PlanRequest
from trainers.offloading.tracing.closure import CONTEXTS, BatchParts, StepArguments
from trainers.offloading.tracing.refusals import user_error
from trainers.offloading.tracing.side_effects import LogCall, say

STEP = "training_step"


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
        self.graphs = LaneGraphs(self._module, self._optimizer, request, self.gradients)

    @property
    def plan(self) -> Plan | None:
        """The plan of a lane beside the update. It exists after the first lane."""
        return self.graphs.plan

    @property
    def runner(self) -> Runner | None:
        return self.graphs.runner

    def close(self) -> None:
        self.graphs.close()

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

    def _add_lane(self, batch: Any, size: int, seed: int) -> Tensor:
        try:
            parts = BatchParts.of(self._on_device(batch))
            index = self._batch_index if self._takes_index else None
            lane = self.graphs.lane_for(StepArguments(STEP, parts, index), size / self._micro)
        except CaptureError as error:
            if mistake := user_error(error):
                raise mistake from None
            raise self._refused(error) from error
        self._roll(seed)  # a capture may have drawn
        outputs = self.graphs.run(lane, parts)
        with self.catcher.catching(size), self._context():
            say([self._caught(call) for call in lane.recipe.calls], outputs, parts.given)
        return lane.recipe.loss(outputs, parts.given)

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
