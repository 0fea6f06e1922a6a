"""Lets the tasks of several devices draw random numbers without waiting for each other. Pure.

    eager          draw 0 [0, 8)   draw 1 [8, 12)   draw 2 [12, 20)    one after the other
    device 0, 1    draw 0, draw 2 | draw 1       each from its own place in the same sequence

Every draw follows the one before, because both move one generator on. So a micro-batch's forward
pass would wait for the last device's part of the one before. A generator of CUDA can begin anywhere
in its sequence, and it was measured how far each kernel moves it on. So the place of each draw is
known, and it follows only the first one, which notes where the step begins.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from offload.graph.taskgraph import Task, TaskGraph
from offload.program.generators import StepDraws, draws_at_a_place
from offload.program.kernels import device_of


def free_draws(graph: TaskGraph) -> TaskGraph:
    """The same step, whose tasks draw in any order. On CPUs they draw one after the other, and also
    where a kernel draws from another generator, seeds one, or has numbers that differ from step to
    step."""
    drawing = [number for number, task in enumerate(graph.tasks) if task.random]
    if not drawing:
        return graph
    if device_of(graph).type != "cuda":
        return _chain(graph, drawing)
    ends = [0]
    for number in drawing:
        task = graph.tasks[number]
        if draws_at_a_place(getattr(task.kernel, "calls", ())):
            return graph
        advance = _find_advance(task)
        if advance is None:
            note = f"draws wait for each other, because {task.name} may draw in other ways, too"
            return _chain(graph.with_tasks(graph.tasks, None, note), drawing)
        ends.append(ends[-1] + advance)
    draws, first = StepDraws(device_of(graph), total=ends[-1]), drawing[0]
    tasks = list(graph.tasks)
    for number, start, end in zip(drawing, ends[:-1], ends[1:], strict=True):
        task = tasks[number]
        others = {a for a in task.after if not tasks[a].random}
        after = others if number == first else others | {first}
        kernel = draws.wrap(task.kernel.calls, start, end, begins=number == first)
        tasks[number] = replace(task, kernel=kernel, after=tuple(sorted(after)))
    return graph.with_tasks(tasks)


def _chain(graph: TaskGraph, drawing: Sequence[int]) -> TaskGraph:
    """The same step, whose tasks draw one after the other, those of several lanes as well: every
    kernel draws from one default generator, which each lane seeds."""
    tasks = list(graph.tasks)
    for before, number in pairwise(drawing):
        after = tuple(sorted({*tasks[number].after, before}))
        tasks[number] = replace(tasks[number], after=after)
    return graph.with_tasks(tasks)


def _find_advance(task: Task) -> int | None:
    """How far a task moves the generator on; None if that is unknown."""
    calls = getattr(task.kernel, "calls", ())
    advances = [None if getattr(call.op, "varying", ()) else call.advance for call in calls]
    known = [advance for advance in advances if advance is not None]
    return sum(known) if advances and len(known) == len(advances) else None
