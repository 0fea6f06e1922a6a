"""Chooses how often each micro-batch goes round all devices. Pure.

    one lap     device 0   [L0 L1 L2 L3]            long waits for the first and the last one
    four laps   device 0   [L0] [L8] [L16] [L24]    short waits, more sends, and updates of the host
                device 1   [L1] [L9] ...            run earlier; a large head makes one lap longer

Each number of laps is tried with a sketch of the step: one task for each pass through a chunk.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.taskgraph import BACKWARD, FORWARD, UPDATE, Role, TaskGraph
from offload.lowering.device_cuts import Cut, cut_step
from offload.lowering.device_order import list_groups, schedule_tasks

LAPS = (1, 2, 4)
WORTH = 0.99
"""Of the seconds with fewer laps: with more laps a step is to take less."""


def choose_cut(
    graph: TaskGraph, pairs: Mapping[int, int], devices: int, laps: Sequence[int], costs: Costs
) -> Cut:
    """The cut with the fastest sketch. `laps`: the numbers of laps to try, few to many."""
    cuts = [cut_step(graph, pairs, devices, count, costs) for count in laps]
    seconds = [
        _predict_seconds(graph, cut, devices, count, costs) / WORTH**more
        for more, (cut, count) in enumerate(zip(cuts, laps, strict=True))
    ]
    return cuts[seconds.index(min(seconds))]


def _predict_seconds(graph: TaskGraph, cut: Cut, devices: int, laps: int, costs: Costs) -> float:
    """The seconds of a step that never waits for a weight or a state, and whose updates run on the
    host."""
    sketch = _sketch_step(graph, cut, devices, laps, costs)
    ends = [end for _, end in schedule_tasks(sketch, costs, list_groups(sketch)[0], 2)]
    sent = Counter[int]()
    for task in sketch.tasks:
        if task.phase != UPDATE:
            sent[task.device] += sketch.buffers[task.writes[-1]].nbytes
    return max([0.0, *ends, *(costs.of_copy("send", nbytes) for nbytes in sent.values())])


def _sketch_step(graph: TaskGraph, cut: Cut, devices: int, laps: int, costs: Costs) -> TaskGraph:
    """A task for each pass of each micro-batch through a chunk, and equal updates on the host."""
    seconds = defaultdict[tuple[int, str, int], float](float)
    for number, chunk in cut.chunk_of.items():
        task = graph.tasks[number]
        seconds[task.turn, task.phase, chunk] += costs.of_task(task)
    chunks = devices * laps
    builder = GraphBuilder()
    sums = [builder.buffer(f"sum {chunk}", 0, Role.STATE) for chunk in range(chunks)]
    sent = [*cut.sent, *[0] * (chunks - len(cut.sent))]
    """What goes on behind each chunk, and what comes back to it."""
    for turn in sorted({turn for turn, _, _ in seconds}):
        before = list[int]()
        there = [(FORWARD, chunk, sent[chunk], list[int]()) for chunk in range(chunks)]
        back = [(BACKWARD, chunk, sent[chunk - 1], [sums[chunk]]) for chunk in range(chunks)]
        for phase, chunk, nbytes, changed in (*there, *reversed(back)):
            lap, device = divmod(chunk, devices)
            made = builder.buffer(f"{phase} {turn}.{chunk}", nbytes)
            builder.task(
                f"{phase} {turn}.{chunk}", (*before, *changed), (*changed, made), phase=phase,
                turn=turn, lap=lap, device=device, seconds=seconds[turn, phase, chunk],
            )  # fmt: skip
            before = [made]
    traffic = sum(task.traffic for task in graph.tasks if task.phase == UPDATE) // chunks
    for chunk, b in enumerate(sums if traffic else ()):
        how: dict[str, Any] = {"lane": "host", "phase": UPDATE, "traffic": traffic}
        builder.task(f"update {chunk}", (b,), (b,), **how)
    return builder.graph()
