"""Whether a plan may take its memory now, on the host and on its device."""

from collections.abc import Mapping

from offload.memory.arenas import give_cached_back
from offload.memory.device_memory import check_device, device_left
from offload.memory.host_memory import check_memory, memory_left
from offload.memory.runnable import RunnablePlan
from offload.program.kernels import device_of


def check_room(plan: RunnablePlan, arenas: Mapping[int, int], waiting: int = 0) -> None:
    """Raise `MemoryTooSmall` unless the arenas of a plan, or larger ones, may be taken now, and a
    waiting place of so many bytes."""
    check_memory(plan, arenas, memory_left(), waiting)
    device = device_of(plan.graph)
    if device.type == "cuda":
        give_cached_back(device)
        check_device(plan, arenas, device_left(device))
