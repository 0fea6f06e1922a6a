"""Makes one graph of several micro-batches, and says what they share (micro_batches.py joins them).

    an optimizer step    F1 B1 | f1 b1 U     the sums end with the update
    no update            F1 B1 | f1 b1       the sums are the user's tensors, and stay
    draws=               each draws from a generator of its own (program/own_draws.py)
    same_buffers=        each begins with the statistics that the first one begins with

With the last two, micro-batches know nothing of each other but the sums. So it does not matter
which of them run together, or where.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from offload.errors import GraphError
from offload.graph.taskgraph import Role, Task, TaskGraph
from offload.lowering.host_updates import is_update
from offload.lowering.micro_batches import joined
from offload.program.kernels import Call, Value
from offload.program.own_draws import DrawState


def in_turn(
    graphs: Sequence[TaskGraph],
    draws: Sequence[torch.Generator] = (),
    *,
    same_buffers: bool = False,
) -> TaskGraph:
    """One graph for all of them, with the inputs, outputs and calls after the step in their order.

    `draws`: a generator for each micro-batch, which it draws from in place of the default one.
    Whoever runs the graph seeds them before. `same_buffers`: each micro-batch begins with the
    module's buffers as they are before the first; what the first one leaves in them stays."""
    if draws and len(draws) != len(graphs):
        raise GraphError(
            f"there are {len(draws)} generators for {len(graphs)} micro-batches. Give one to each"
        )
    stay = not any(map(_updates, graphs))
    if draws:
        graphs = [drawing_from(graph, one) for graph, one in zip(graphs, draws, strict=True)]
    whole = joined(graphs, sums_stay=stay, draws_apart=bool(draws))
    return _from_same_buffers(whole) if same_buffers else whole


def _updates(graph: TaskGraph) -> bool:
    """Whether the optimizer steps in this graph."""
    return any(
        task.phase == "update"
        and is_update(task)
        and any(graph.buffers[b].role is Role.PARAMETER for b in task.writes)
        for task in graph.tasks
    )


def drawing_from(graph: TaskGraph, generator: torch.Generator, turn: int = 0) -> TaskGraph:
    """The graph, whose random tasks of this micro-batch draw from this generator in place of the
    default one."""
    if graph.program is None:
        raise GraphError("a graph made by hand cannot be given a generator: it draws as it likes")
    state = DrawState(generator, graph.program.device)
    tasks = [
        replace(task, kernel=state.around(task.kernel.calls))
        if task.random and task.turn == turn
        else task
        for task in graph.tasks
    ]
    return graph.with_tasks(tasks)


def _from_same_buffers(graph: TaskGraph) -> TaskGraph:
    """The graph, in which later micro-batches change copies of the buffers that they change. The
    copies are made before the first one changes anything."""
    changed = {
        b for task in graph.tasks for b in task.writes if graph.buffers[b].role is Role.BUFFER
    }
    buffers, copies = list(graph.buffers), list[Task]()
    names: dict[int, dict[int, int]] = {}
    for task in graph.tasks:
        own = names.setdefault(task.turn, {})
        for b in task.touches if task.turn else ():
            if b not in changed or b in own:
                continue
            name = f"{buffers[b].name} [{task.turn}]"
            own[b] = len(buffers)
            buffers.append(replace(buffers[b], name=name, role=Role.TEMPORARY, tensor=name))
            copies.append(_copy(graph, b, own[b], task))
    tasks = [
        replace(task.renamed(names[task.turn]), after=tuple(len(copies) + a for a in task.after))
        for task in graph.tasks
    ]
    return graph.with_tasks([*copies, *tasks], buffers)


def _copy(graph: TaskGraph, source: int, to: int, user: Task) -> Task:
    """A copy of all bytes of a buffer for the micro-batch of `user`."""
    of = graph.buffers[source]
    there, here = (Value(b, torch.uint8, (of.nbytes,), (1,)) for b in (to, source))
    return Task(
        f"{of.name}.copy [{user.turn}]",
        (source,),
        (to,),
        device=user.device,
        traffic=2 * of.nbytes,
        turn=user.turn,
        kernel=Call(torch.ops.aten.copy_.default, (there, here), allocations=()),
    )
