"""The lanes of a step, and its update, as steps of a live session within a byte budget.

    a lane     a live step: seed -> training_step -> backward into the sums
    a commit   mean -> sums -> a live step: clip -> update

All else of a step is as without a budget (working/plain_work.py), with equal bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainers.elastic.commits.commit import Commit
from trainers.elastic.planned.planning import Planning
from trainers.elastic.planned.separate_sums import SeparateSums
from trainers.elastic.working.plain_work import AddedLane, PlainWork


class PlannedWork(PlainWork):
    """One peer's. It implements `LaneWork` (commits/commit.py)."""

    def __init__(self, *args: Any, planning: Planning, exact: bool) -> None:
        """`args`: those of `PlainWork`."""
        self.planning = planning
        super().__init__(*args, exact=exact)

    def begin(self, step: int) -> None:
        self.planning.open()
        super().begin(step)

    def apply_commit(self, commit: Commit) -> None:
        """Begin the live step of the update, which the strategy ends."""
        self.planning.open()
        super().apply_commit(commit)
        self.planning.begin("update")

    # ---- details --------------------------------------------------------------------------------

    def _make_sums(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> SeparateSums:
        sums = SeparateSums(named, self.planning.home_of)
        self.planning.place(self._module, self._optimizer, sums.all)
        return sums

    def _add_first(self, lanes: Sequence[int]) -> Sequence[AddedLane]:
        with self.planning.step("lane"):
            size, loss = self._add(lanes[0])
        return [AddedLane(lanes[0], size, float(loss))]

    def _state_tensors(self) -> list[Tensor]:
        return [*map(self.planning.home_of, super()._state_tensors())]
