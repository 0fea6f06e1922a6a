"""Whether a plan may take its memory now, on the host and on its device.

What lies in files (`host_dir`) takes no memory: their disk refuses them when they are made.
"""

from collections.abc import Mapping
from pathlib import Path

from offload.errors import MemoryTooSmall
from offload.graph.taskgraph import HOST
from offload.memory.arenas import give_cached_back
from offload.memory.device_memory import check_device, device_left
from offload.memory.host_memory import check_memory, memory_left, returned_bytes
from offload.memory.runnable import RunnablePlan
from offload.program.kernels import device_of
from offload.sizes import say_size


def check_room(
    plan: RunnablePlan,
    arenas: Mapping[int, int],
    waiting: int = 0,
    host_dir: str | Path | None = None,
) -> None:
    """Raise `MemoryTooSmall` unless the arenas of a plan, or larger ones, may be taken now, and a
    waiting place of so many bytes."""
    if host_dir is not None:
        arenas, waiting = _without_host(arenas), 0
    check_memory(plan, arenas, memory_left(), waiting)
    device = device_of(plan.graph)
    if device.type == "cuda":
        give_cached_back(device)
        check_device(plan, arenas, device_left(device))


def check_move(
    plan: RunnablePlan,
    arenas: Mapping[int, int],
    waiting: int = 0,
    freed: int = 0,
    host_dir: Path | None = None,
) -> None:
    """Raise `MemoryTooSmall` unless these arenas and a waiting place may be taken beside those
    where the tensors are now. `freed`: bytes of the device that are given up before."""
    if host_dir is not None:
        arenas, waiting = _without_host(arenas), 0
    device, left = device_of(plan.graph), memory_left()
    on_host = arenas.get(HOST, 0) + waiting
    on_device = max((nbytes for number, nbytes in arenas.items() if number != HOST), default=0)
    if device.type == "cpu":
        every = sum(arenas.values()) + waiting + plan.reserve + returned_bytes(plan.graph)
        _check(every - freed, left.nbytes, "memory", left.where)
        return
    _check(on_host, left.nbytes, "memory of the host", left.where)
    if on_device:
        give_cached_back(device)
        free = device_left(device).free
        needed = on_device + plan.reserve - freed
        _check(needed, free, str(device), f"{say_size(free)} are free there")


def _without_host(arenas: Mapping[int, int]) -> dict[int, int]:
    return {number: nbytes for number, nbytes in arenas.items() if number != HOST}


def _check(needed: int, left: int, what: str, where: str) -> None:
    if needed > left:
        raise MemoryTooSmall(
            f"{say_size(needed)} of {what} are needed to move to this plan, but only"
            f" {say_size(left)} are left: {where}. Nothing has moved, and the old plan goes on."
            " Give a smaller budget, or end what else uses memory",
            needed=needed,
            left=left,
        )
