"""The lanes of a step, and its update, as steps of a live session within a byte budget.

    lanes      a live step: seed -> training_step -> backward into the sums, for one or several
    a commit   mean -> sums -> a live step: clip -> update

All else of a step is as without a budget (work/plain_work.py), with equal bits. Of several lanes
in a step each draws by its own seed, begins with the committed buffers, and adds to the sums after
the one before.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from loaders.lanes.lane_loader import LaneBatch
from offload import Plan
from offload.live.lanes import begin_lane
from offload.torch_seams import pytree
from trainers.elastic.work.commit import Commit
from trainers.elastic.work.gradient_sums import SeparateSums
from trainers.elastic.work.group_choice import GroupChoice, together
from trainers.elastic.work.plain_work import AddedLane, PlainWork
from trainers.elastic.work.planning import Planning


class PlannedWork(PlainWork):
    """What one peer with a budget computes of its steps."""

    def __init__(self, *args: Any, planning: Planning, exact: bool) -> None:
        """`args`: those of `PlainWork`."""
        self.planning = planning
        super().__init__(*args, exact=exact)
        why_alone = "sum='exact' rounds the gradients of each lane by themselves" if exact else ""
        self._choice = GroupChoice(why_alone)
        self._knows_update = False
        """Whether the update has a plan, which has a part in what a share of a budget is."""
        self._mine = 0
        """So many lanes fell to this peer in this step at first."""
        self._taken: dict[int, LaneBatch] = {}
        """Lanes of this step that are not yet computed, though their batches are here."""

    def begin(self, step: int) -> None:
        self.planning.open()
        super().begin(step)
        self._mine = 0
        self._taken.clear()

    def apply_commit(self, commit: Commit) -> None:
        """Begin the live step of the update, which the strategy ends."""
        self.planning.open()
        super().apply_commit(commit)
        self.planning.begin("update")
        self._knows_update = True

    # ---- details --------------------------------------------------------------------------------

    def _make_sums(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> SeparateSums:
        sums = SeparateSums(named, self.planning.home_of)
        self.planning.place(self._module, self._optimizer, sums.tensors)
        return sums

    def _add_first(self, lanes: Sequence[int]) -> Sequence[AddedLane]:
        self._mine = self._mine or len(lanes)
        size = self._choice.size(self._mine)
        count = together(lanes, self._sizes, self._micro, self._lanes_with_samples[0], size)
        forms = [_form(self._take(lane).batch) for lane in lanes[:count]]
        group = lanes[: count if all(form == forms[0] for form in forms) else 1]
        found: list[tuple[int, Tensor]] = []
        left: list[Tensor] = []
        with self.planning.step(f"{len(group)} lanes"):
            for number, lane in enumerate(group):
                if number == 1:
                    left = [buffer.detach().clone() for buffer in self._module.buffers()]
                if number:
                    self._restore_buffers()
                found.append(self._add(lane))
        if left:
            self._put_buffers(left)
        for lane in group:
            del self._taken[lane]
        self.planning.plan = max(self.planning.ran, key=_tasks, default=None)
        if self._knows_update and self._sizes[group[0]] == self._micro:
            self._choice.note(len(group), self._mine, self.planning.ran)
        added = zip(group, found, strict=True)
        return [AddedLane(lane, size, float(loss)) for lane, (size, loss) in added]

    def _take(self, lane: int) -> LaneBatch:
        """Take a lane's batch once, to the device: within a step a copy would wait for all before
        it."""
        if lane not in self._taken:
            taken = super()._take(lane)
            device = self.planning.request.target.device
            self._taken[lane] = replace(taken, batch=move_data_to_device(taken.batch, device))
        return self._taken[lane]

    def _seed_torch(self, seed: int) -> None:
        begin_lane(seed)

    def _state_tensors(self) -> list[Tensor]:
        return [*map(self.planning.home_of, super()._state_tensors())]


def _tasks(plan: Plan) -> int:
    return len(plan.graph.tasks)


def _form(batch: Any) -> list[Any]:
    """What batches have in common whose lanes run alike."""
    leaves = pytree.tree_leaves(batch)
    return [(t.dtype, t.shape, t.stride()) for t in leaves if isinstance(t, Tensor)]
