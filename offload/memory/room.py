"""Whether a plan may take its memory now, on the host and on its devices.

    a plan needs      its arenas - tensors that move into them + the largest of these a second time
                      + what kernels allocate outside of the arenas + what the step returns
    at the end        memory for all these tensors again, because they leave the arenas

What lies in files (`host_dir`) takes no memory: their disk refuses them when they are made. Files
in a tmpfs take memory, but they are no data of the process.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from offload.errors import MemoryTooSmall
from offload.graph.taskgraph import HOST
from offload.memory.arenas import give_cached_back, number_device
from offload.memory.device_memory import check_device, device_left
from offload.memory.file_memory import is_ram
from offload.memory.host_memory import HostMemoryLeft, memory_left
from offload.memory.host_needs import moving_sizes, returned_bytes
from offload.memory.runnable import RunnablePlan
from offload.program.kernels import device_of
from offload.sizes import format_size


def check_room(
    plan: RunnablePlan,
    arenas: Mapping[int, int],
    waiting: int = 0,
    host_dir: str | Path | None = None,
) -> None:
    """Raise `MemoryTooSmall` unless the arenas of a plan, or larger ones, may be taken now, and a
    waiting place of so many bytes."""
    for in_memory, parked, left in _list_memory(arenas, waiting, host_dir):
        check_memory(plan, in_memory, left, parked)
    device = device_of(plan.graph)
    if device.type == "cuda":
        give_cached_back(device)
        for number, nbytes in {0: 0, **arenas}.items():
            if number != HOST:
                check_device(plan, nbytes, device_left(number_device(device, number)))


def check_memory(
    plan: RunnablePlan, arenas: Mapping[int, int], left: HostMemoryLeft, waiting: int = 0
) -> None:
    """Raise `MemoryTooSmall` unless there is memory for a plan's arenas, which may be larger, and
    for the place where `waiting` bytes of residents are parked."""
    graph, outside = plan.graph, plan.reserve
    if device_of(graph).type != "cpu":
        _check_host(plan, arenas.get(HOST, 0), left, waiting)
        return
    sizes = moving_sizes(plan)
    moving, twice = sum(sizes.values()), max(sizes.values(), default=0)
    returned = returned_bytes(graph)
    needed = max(sum(arenas.values()) - moving + twice + outside + returned, moving) + waiting
    if needed <= left.nbytes:
        return
    parts = [
        f"the arena of {'the host' if arena == HOST else f'device {arena}'} {format_size(nbytes)}"
        for arena, nbytes in sorted(arenas.items(), reverse=True)
        if nbytes
    ]
    parts += [f"residents while they are parked {format_size(waiting)}"] if waiting else []
    parts += [f"what the step returns {format_size(returned)}"] if returned else []
    parts += [f"kernels besides {format_size(outside)}"] if outside else []
    raise MemoryTooSmall(
        f"{format_size(needed)} of memory are needed, but only {format_size(left.nbytes)} are left:"
        f" {left.where}. {', '.join(parts)}; {format_size(moving)} of tensors move into the arenas"
        " and, at the end, out of them again. Make the batch smaller, allow recomputing,"
        " give a budget and a host_budget that fit together, or raise the limit\n\n"
        + plan.explain(),
        needed=needed,
        left=left.nbytes,
    )


def _check_host(plan: RunnablePlan, arena: int, left: HostMemoryLeft, waiting: int) -> None:
    """Check a plan for a device: its host arena and its waiting place are locked at once, before
    any tensor moves there."""
    nbytes = arena + waiting
    if nbytes > left.nbytes:
        parked = f" and {format_size(waiting)} of parked residents" if waiting else ""
        raise MemoryTooSmall(
            f"{format_size(nbytes)} of memory are needed for the arena of the host{parked}, but"
            f" only {format_size(left.nbytes)} are left: {left.where}. Give a host_budget or a"
            " larger budget of the device, make the batch smaller, or raise the limit\n\n"
            + plan.explain(),
            needed=nbytes,
            left=left.nbytes,
        )


def check_move(
    plan: RunnablePlan,
    arenas: Mapping[int, int],
    waiting: int = 0,
    freed: Mapping[int, int] | None = None,
    host_dir: Path | None = None,
) -> None:
    """Raise `MemoryTooSmall` unless these arenas and a waiting place may be taken beside those
    where the tensors are now. `freed`: bytes of each device that are given up before."""
    freed = freed or {}
    device = device_of(plan.graph)
    if device.type == "cpu":
        for in_memory, parked, left in _list_memory(arenas, waiting, host_dir):
            every = sum(in_memory.values()) + parked + plan.reserve + returned_bytes(plan.graph)
            _check(every - sum(freed.values()), left.nbytes, "memory", left.where)
        return
    left, on_host = memory_left(), arenas.get(HOST, 0) + waiting
    _check(on_host, left.nbytes, "memory of the host", left.where)
    give_cached_back(device)
    for number, nbytes in arenas.items():
        if number != HOST and nbytes:
            on = number_device(device, number)
            free = device_left(on).free
            needed = nbytes + plan.reserve - freed.get(number, 0)
            _check(needed, free, str(on), f"{format_size(free)} are free there")


def _list_memory(
    arenas: Mapping[int, int], waiting: int, host_dir: str | Path | None
) -> Iterator[tuple[Mapping[int, int], int, HostMemoryLeft]]:
    """Yield arenas and a waiting place, and what they together have to fit into."""
    if host_dir is None:
        yield arenas, waiting, memory_left()
        return
    if is_ram(host_dir):
        left = memory_left(data=False)
        where = f"{left.where}; files in host_dir={str(host_dir)!r} are memory, as it is a tmpfs"
        yield arenas, waiting, replace(left, where=where)
    yield {number: n for number, n in arenas.items() if number != HOST}, 0, memory_left()


def _check(needed: int, left: int, what: str, where: str) -> None:
    if needed > left:
        raise MemoryTooSmall(
            f"{format_size(needed)} of {what} are needed to move to this plan, but only"
            f" {format_size(left)} are left: {where}. Nothing has moved, and the old plan goes on."
            " Give a smaller budget, or end what else uses memory",
            needed=needed,
            left=left,
        )
