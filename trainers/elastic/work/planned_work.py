"""The lanes of a step, and its update, as steps of a live session within a byte budget.

lanes      a live step: seed -> training_step -> backward into the sums, for one or several
a commit   mean -> sums -> a live step: clip -> update
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from loaders.lanes.lane_loader import LaneBatch
from offload import Plan
from offload.graph.memgraph import RELOAD
from offload.live.lanes import begin_lane
from offload.torch_seams import pytree
from trainers.elastic.work.digests import Commit
from trainers.elastic.work.gradient_sums import SeparateSums
from trainers.elastic.work.plain_work import AddedLane, PlainWork
from trainers.elastic.work.planning import Planning

SIZES: tuple[int, ...] = (1, 2, 4, 8)
"""A swarm is advised to have eight lanes a peer, so a larger group would seldom be full."""
FASTER = 0.98
"""A larger group is worth its longer wait for news if a step takes at most this share."""


class GroupChoice:
    """One peer's."""

    def __init__(self, why_alone: str) -> None:
        """`why_alone`: why lanes cannot run together; empty if they may."""
        self._why_alone = why_alone
        self._seconds: dict[int, float] = {}
        """What the plans of so many lanes predict."""
        self._noted: set[int] = set()

    def size(self, lanes: int) -> int:
        """Return how many lanes run together where so many whole ones fall to the peer."""
        if self._why_alone or not self._seconds:
            return 1
        return next_size(self._seconds, lanes) or best_size(self._seconds, lanes)

    def note(self, size: int, lanes: int, plans: Sequence[Plan]) -> None:
        """Know of the plans by which `size` whole lanes ran, of the `lanes` that the peer has."""
        if size in self._noted:
            return
        self._noted.add(size)
        self._why_alone = self._why_alone or _why_alone(plans)
        if not self._why_alone:
            self._seconds[size] = plans[0].predicted_seconds
        times = ", ".join(f"{n}: {took / n:.3g} s" for n, took in self._seconds.items())
        text = (
            f"lanes run one by one: {self._why_alone}"
            if self._why_alone
            else f"lanes run {self.size(lanes)} at a time from now on; predicted for a lane {times}"
        )
        for plan in plans:
            plan.remarks.add(text)


def _why_alone(plans: Sequence[Plan]) -> str:
    """Say why a group would not help; empty: it may."""
    if len(plans) != 1:
        return f"the Python of a lane needs values in its middle, so it ran in {len(plans)} parts"
    if plans[0].graph.device_count == 1 and not _copies_weights(plans[0]):
        return "all weights are resident"
    return ""


def _copies_weights(plan: Plan) -> bool:
    buffers = plan.graph.buffers
    return any(n.kind == RELOAD and buffers[n.buffer].persistent for n in plan.memgraph.nodes)


def next_size(seconds: Mapping[int, float], lanes: int) -> int | None:
    """Return the size that is to be planned next; None where no larger one is worth a try.

    `seconds`: what a graph of each size takes that is planned already, 1 among them. `lanes`: so
    many the peer has in a step."""
    if best_size(seconds, lanes) < max(seconds):
        return None
    return next((size for size in SIZES if max(seconds) < size <= lanes), None)


def best_size(seconds: Mapping[int, float], lanes: int) -> int:
    """Return the size with which a step of so many lanes is made first."""
    best = 1
    for size in sorted(seconds):
        if _of_step(seconds, size, lanes) <= FASTER * _of_step(seconds, best, lanes):
            best = size
    return best


def together(lanes: Sequence[int], sizes: Sequence[int], whole: int, first: int, group: int) -> int:
    """Return how many of the first of these lanes run as one graph: `group`, or 1.

    `sizes`: the samples of every lane. A lane with fewer than `whole` has a graph of its own.
    `first`: the step's first lane, whose buffers are committed. What a group leaves in the buffers
    is of its first lane, so this lane begins a group or is in none."""
    some = lanes[:group]
    if len(some) < group or first in some[1:] or any(sizes[lane] != whole for lane in some):
        return 1
    return group


def _of_step(seconds: Mapping[int, float], size: int, lanes: int) -> float:
    groups, singles = divmod(lanes, size)
    return groups * seconds[size] + singles * seconds[1]


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

    def _make_sums(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> SeparateSums:
        sums = SeparateSums(named, self.planning.home_of)
        self.planning.place(self._module, self._optimizer, sums.tensors)
        return sums

    def _add_first(self, lanes: Sequence[int]) -> Sequence[AddedLane]:
        step = self._step
        self._mine = self._mine or len(lanes)
        size = self._choice.size(self._mine)
        count = together(lanes, step.sizes, step.micro, step.with_samples[0], size)
        forms = [_form(self._take(lane).batch) for lane in lanes[:count]]
        group = lanes[: count if all(form == forms[0] for form in forms) else 1]
        added: list[tuple[int, Tensor]] = []
        left: list[Tensor] = []
        with self.planning.step(f"{len(group)} lanes"):
            for number, lane in enumerate(group):
                if number == 1:
                    left = self._copy_buffers()
                if number:
                    self._restore_buffers()
                added.append(self._add(lane))
        if left:
            self._put_buffers(left)
        for lane in group:
            del self._taken[lane]
        self.planning.plan = max(
            self.planning.ran, key=lambda plan: len(plan.graph.tasks), default=None
        )
        if self._knows_update and step.sizes[group[0]] == step.micro:
            self._choice.note(len(group), self._mine, self.planning.ran)
        pairs = zip(group, added, strict=True)
        return [AddedLane(lane, size, float(loss)) for lane, (size, loss) in pairs]

    def _take(self, lane: int) -> LaneBatch:
        """Take a lane's batch to the device once: within a step a copy would wait."""
        if lane not in self._taken:
            taken = super()._take(lane)
            device = self.planning.request.target.device
            self._taken[lane] = replace(taken, batch=move_data_to_device(taken.batch, device))
        return self._taken[lane]

    def _seed_torch(self, seed: int) -> None:
        begin_lane(seed)

    def _state_tensors(self) -> list[Tensor]:
        return [*map(self.planning.home_of, super()._state_tensors())]


def _form(batch: Any) -> list[Any]:
    """What batches have in common whose lanes run alike."""
    leaves = pytree.tree_leaves(batch)
    return [(t.dtype, t.shape, t.stride()) for t in leaves if isinstance(t, Tensor)]
