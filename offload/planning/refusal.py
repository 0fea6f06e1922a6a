"""Finds the least that a plan needs, and refuses a budget with the numbers before a run. Pure.

The largest task sets the smallest budget: all that it touches must lie on the device at once.
"""

from collections.abc import Collection, Mapping
from typing import NoReturn

from offload.errors import BudgetTooSmall
from offload.graph.memgraph import SMALL_WORKSPACE, Place
from offload.graph.taskgraph import HOST, Task, TaskGraph
from offload.sizes import format_size, size_to_give


def scratch_bytes(graph: TaskGraph, device: int) -> int:
    """The largest small workspace. All small ones share its memory, because nearly all tasks have
    one."""
    small = [
        task.workspace
        for task in graph.tasks
        if task.device == device and task.lane == "compute" and task.workspace <= SMALL_WORKSPACE
    ]
    return graph.align(max(small)) if any(small) else 0


def working_set(graph: TaskGraph, task: Task, device: int, resident: Collection[int] = ()) -> int:
    """Bytes of a device that a task needs beside what is resident."""
    if task.lane == "host" or task.device != device:
        return 0
    nbytes = sum(graph.align(graph.buffers[b].nbytes) for b in task.touches if b not in resident)
    if task.workspace > SMALL_WORKSPACE:
        nbytes += graph.align(task.workspace)
    return nbytes


def resident_bytes(
    graph: TaskGraph, device: int, resident: Collection[int], homes: Mapping[int, Place]
) -> int:
    """Bytes of a device below everything that comes and goes: the given homes, then the other
    residents after them or in holes between them."""
    homes_of = graph.home_devices()
    used = {b for task in graph.tasks for b in task.touches}
    used |= {*graph.outputs, *graph.kept, *homes}
    homeless = sum(
        graph.align(graph.buffers[b].nbytes)
        for b in used
        if b in resident and b not in homes and homes_of[b] == device
    )
    there = (p.offset + graph.align(p.nbytes) for p in homes.values() if p.arena == device)
    return max(there, default=0) + homeless + scratch_bytes(graph, device)


def smallest_budget(graph: TaskGraph, device: int) -> tuple[int, str]:
    """The smallest arena of a device that any plan can use, and the task that sets it."""
    needed, name = 0, "no task"
    for task in graph.tasks:
        if (nbytes := working_set(graph, task, device)) > needed:
            needed, name = nbytes, task.name
    return needed + scratch_bytes(graph, device), name


def refuse(
    graph: TaskGraph, capacities: Mapping[int, int], device: int, reserve: int = 0
) -> NoReturn:
    """Refuse a budget that cannot hold the largest task and `reserve` bytes beside it."""
    needed, name = smallest_budget(graph, device)
    needed, capacity = needed + reserve, capacities[device] + reserve
    where = next((task.where for task in graph.tasks if task.name == name), "")
    on = f" on device {device}" if len(graph.devices) > 1 else ""
    raise BudgetTooSmall(
        f"{format_size(needed)} are needed{on} at task {name}{f' ({where})' if where else ''}, but"
        f" the budget is {format_size(capacity)}",
        needed=needed,
        task=name,
    )


def advise(refused: BudgetTooSmall, budget: object, host_budget: object) -> BudgetTooSmall:
    """The refusal with the nearest budget that works, in the unit of the one that was given."""
    if refused.on_host:
        enough = size_to_give(refused.needed, host_budget)
        return refused.with_advice(f"raise host_budget to {enough}, or raise the budget")
    enough = size_to_give(refused.needed, budget)
    return refused.with_advice(f"raise the budget to {enough} or lower the batch size")


def refuse_arena(arena: int, needed: int, capacity: int, name: str) -> NoReturn:
    """Refuse an arena that ends before a buffer has its place in it."""
    if arena == HOST:
        refuse_host(needed, capacity, name)
    raise BudgetTooSmall(
        f"{name} ends at {format_size(needed)}, but the budget is {format_size(capacity)}",
        needed=needed,
        task=name,
        advice="raise the budget",
    )


def refuse_host(needed: int, capacity: int, name: str) -> NoReturn:
    """Refuse a host arena that cannot hold what does not fit on the devices."""
    raise BudgetTooSmall(
        f"{format_size(needed)} of host memory are needed (at {name}), but host_budget is"
        f" {format_size(capacity)}",
        needed=needed,
        task=name,
        on_host=True,
    )
