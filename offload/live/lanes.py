"""Lanes of a step: stretches of it that know nothing of each other but what they add up.

begin_lane(3)  draws  draws   begin_lane(7)  draws     as issued: the default generators are
                                                       seeded anew where a lane begins
in a plan      3: draws from a generator of its own    so lanes may take turns, and a weight
               7: from the default one, as the last    comes in once for several of them
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.types import Number

from offload.graph.taskgraph import TaskGraph
from offload.live.tape_calls import TapeCall
from offload.program.generators import DrawState

BEGINS = "offload_live::begin_lane.default"


@torch.library.custom_op(
    "offload_live::begin_lane", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def begin_lane(seed: Number) -> None:
    """Seed all default generators, in a live step when its kernels run."""
    torch.default_generator.manual_seed(int(seed))
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(int(seed))


def lanes_of(calls: Sequence[TapeCall]) -> Iterator[int]:
    """The number of each call's lane. All are of one where the first draws go on with a lane that
    had begun before."""
    first = next((call for call in calls if call.random), None)
    apart = first is not None and first.op == BEGINS
    begun = 0
    for call in calls:
        begun += apart and call.op == BEGINS
        yield max(begun - 1, 0)


def has_lanes(graph: TaskGraph) -> bool:
    """Whether its turns are lanes. Those of several devices are micro-batches, which draw from one
    generator after the other."""
    return graph.device_count == 1 and any(task.turn for task in graph.tasks)


def give_own_generators(graph: TaskGraph) -> TaskGraph:
    """The graph, in which all lanes but the last draw from generators of their own."""
    if not has_lanes(graph):
        return graph
    last = max((task.turn for task in graph.tasks), default=0)
    device = graph.program.device if graph.program is not None else torch.device("cpu")
    for turn in range(last):
        graph = _draw_from(graph, DrawState(torch.Generator(device), device), turn)
    return graph


def _draw_from(graph: TaskGraph, state: DrawState, turn: int) -> TaskGraph:
    """The graph, whose random tasks of this lane draw from a generator of its own."""
    return graph.with_tasks(
        [
            replace(task, kernel=state.wrap(task.kernel.calls))
            if task.random and task.turn == turn
            else task
            for task in graph.tasks
        ]
    )
