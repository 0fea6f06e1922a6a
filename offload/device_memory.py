"""How much of a CUDA device may be taken now, and by whom the rest is held.

    total |== other processes ==|== this one ==|~~ cached ~~|........ free ........|
                                                \\_ given back before an arena is taken

A plan is made for a budget, whatever the device holds at the moment. So the device is asked just
before the arena is taken: what does not fit is refused with numbers, and nothing was touched yet.
What is measured before there is a plan takes memory too: refused that, it says who has the rest.
NVML names the other processes where its package (pynvml) is there; else only the sum is known.
CUDA's own context (some hundred MiB a process) is in no budget: it is not free to begin with.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import MemoryTooSmall
from offload.runnable import Plan
from offload.sizes import say_size
from offload.taskgraph import HOST


@dataclass(frozen=True, slots=True)
class Held:
    """What a process has of a device."""

    pid: int
    nbytes: int | None
    """None: the driver does not say (in containers)."""


@dataclass(frozen=True, slots=True)
class DeviceLeft:
    """Of one device."""

    device: torch.device
    free: int
    total: int
    ours: int = 0
    """What this process has by PyTorch's allocator."""
    others: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Readers:
    """Who is asked."""

    memory: Callable[[torch.device], tuple[int, int]]
    """Free and total."""
    reserved: Callable[[torch.device], int]
    processes: Callable[[torch.device], Sequence[Held]]


def cuda_readers() -> Readers:
    return Readers(
        lambda device: torch.cuda.mem_get_info(device),
        lambda device: torch.cuda.memory_reserved(device),
        _processes,
    )


def device_left(device: torch.device, readers: Readers | None = None) -> DeviceLeft:
    """After what PyTorch keeps for later was given back (memory.py)."""
    asked = readers or cuda_readers()
    free, total = asked.memory(device)
    others = tuple(held for held in asked.processes(device) if held.pid != os.getpid())
    return DeviceLeft(device, free, total, asked.reserved(device), others)


def check_device(plan: Plan, arenas: Mapping[int, int], left: DeviceLeft) -> None:
    """Raise `MemoryTooSmall` unless the arena and what kernels take besides fit now.

    Tensors that are on the device already move into the arena, one after the other, when it is
    there: until then they are there twice."""
    arena = max((nbytes for number, nbytes in arenas.items() if number != HOST), default=0)
    needed = max(arena, arena + plan.reserve - _moving(plan, left.device))
    if needed <= left.free:
        return
    raise MemoryTooSmall(
        f"{say_size(needed)} of {left.device} are needed (the arena {say_size(arena)}, kernels and"
        f" libraries besides {say_size(plan.reserve)}), and {say_size(left.free)} of its"
        f" {say_size(left.total)} are free: {_holders(left)}. End what else uses the device, give a"
        " smaller budget, or let the module be on the CPU when the plan is run\n\n"
        + plan.explain(),
        needed=needed,
        left=left.free,
    )


@contextmanager
def measuring(what: str, device: torch.device, remedy: str = "") -> Iterator[None]:
    """`MemoryTooSmall` where the device has not the memory that it takes to measure `what`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        left = device_left(device)
        raise MemoryTooSmall(
            f"there is too little memory on {device} to measure {what}: {say_size(left.free)} of"
            f" its {say_size(left.total)} are free: {_holders(left)}. End what else uses the"
            f" device{remedy}",
            needed=left.free + 1,  # at least: the allocator does not say
            left=left.free,
        ) from error


def _holders(left: DeviceLeft) -> str:
    elsewhere = max(0, left.total - left.free - left.ours)
    parts = [f"this process has {say_size(left.ours)}"]
    for held in left.others:
        much = "an unknown part" if held.nbytes is None else say_size(held.nbytes)
        parts.append(f"process {held.pid} has {much}")
    if not left.others:
        parts.append(f"other processes and CUDA itself have {say_size(elsewhere)}")
    return ", ".join(parts)


def _moving(plan: Plan, device: torch.device) -> int:
    """Bytes of tensors that are on the device now and have their home there."""
    graph = plan.graph
    if graph.program is None:
        return 0
    return sum(
        graph.buffers[b].nbytes
        for b, place in plan.memgraph.starts.items()
        if graph.buffers[b].persistent
        and place.arena != HOST
        and is_on(graph.program.tensors.get(graph.buffers[b].tensor), device)
    )


def is_on(source: Any, device: torch.device) -> bool:
    """A tensor of the user's, or one of several over a storage, or how to find it."""
    if callable(source) and not isinstance(source, torch.Tensor):
        source = source()
    found = source if isinstance(source, torch.Tensor) else next(iter(source or ()), None)
    return found is not None and found.device == device


def _processes(device: torch.device) -> Sequence[Held]:
    """By NVML, if its package is there and it answers."""
    if importlib.util.find_spec("pynvml") is None:
        return ()
    import pynvml  # pyright: ignore[reportMissingImports]

    try:
        pynvml.nvmlInit()
        try:
            # By its identity: NVML numbers the machine's devices, torch those that it may see.
            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()
    return [Held(process.pid, process.usedGpuMemory) for process in found]
