"""The first plan of a peer: of single lanes, or of the group with which its step is made first.

    plan 1 lane -> are weights copied? -> plan 2 -> better? -> plan 4 -> better? -> plan 8
                   no: single lanes       no: stop             no: stop

All of them have the same bytes, and places for the tensors of single lanes and of the update. Which
size is the best one says `deciding/group_size.py`.
"""

from dataclasses import dataclass

import offload
from offload import OffloadError, Plan, TaskGraph
from offload.graph.memgraph import RELOAD
from trainers.elastic.deciding.group_size import best_size, next_size
from trainers.elastic.planned.lane_graph import LaneGraph, LaneGroup
from trainers.offloading.hardware.generators import generators_of
from trainers.offloading.plan_request import PlanRequest


@dataclass(frozen=True, slots=True, eq=False)
class GroupChoice:
    """What a peer's lanes run as."""

    plan: Plan
    group: LaneGroup | None
    """None: lanes run one by one."""
    why: str


def chosen(
    lane: LaneGraph, update: TaskGraph, lanes: int, request: PlanRequest, *, why_alone: str = ""
) -> GroupChoice:
    """Plan a peer that has so many lanes in a step. `why_alone`: why they cannot be in groups."""
    alone = request.plan(offload.beside(lane.graph, update))
    if why := why_alone or _why_alone(lane, alone):
        return GroupChoice(alone, None, f"lanes run one by one: {why}")
    alike, plans = request.with_bytes_of(alone), {1: GroupChoice(alone, None, "")}
    refused = ""
    while not refused and (size := next_size(_seconds(plans), lanes)) is not None:
        try:
            group = LaneGroup.of(lane, size)
            plan = alike.plan(offload.beside(group.graph, lane.graph, update))
        except OffloadError as error:
            refused = f"; {size} at a time: {error}"
        else:
            plans[size] = GroupChoice(plan, group, "")
    best = best_size(_seconds(plans), lanes)
    told = ", ".join(f"{n}: {took / n:.3g} s" for n, took in _seconds(plans).items())
    why = f"lanes run {best} at a time; predicted for a lane {told}{refused}"
    return GroupChoice(plans[best].plan, plans[best].group, why)


def _seconds(plans: dict[int, GroupChoice]) -> dict[int, float]:
    return {size: choice.plan.predicted_seconds for size, choice in plans.items()}


def _why_alone(lane: LaneGraph, alone: Plan) -> str:
    """Say why a group would not help, or would not be exact; empty: neither."""
    if not _copies_weights(alone):
        return "all weights are resident"
    if generators_of(lane.graph):
        return "they draw from a torch.Generator of the module's own, whose order would change"
    return ""


def _copies_weights(plan: Plan) -> bool:
    buffers = plan.graph.buffers
    return any(n.kind == RELOAD and buffers[n.buffer].persistent for n in plan.memgraph.nodes)
