"""How much of a CUDA device may be taken now, and who holds the rest.

    total |== other processes ==|== this one ==|~~ cached ~~|........ free ........|
                                                \\_ given back before an arena is taken

A plan is made for a budget, whatever the device holds at the moment. So the device is asked just
before the arena is taken. If the plan does not fit, it is refused with numbers, and nothing was
touched yet. Measuring kernels before there is a plan takes memory too; if that fails, the error
says who has the rest. NVML names the other processes if its package (pynvml) is installed;
otherwise only their sum is known. CUDA's own context (some hundred MiB a process) is not free
memory, so no budget counts it.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import MemoryTooSmall
from offload.graph.taskgraph import HOST
from offload.memory.runnable import RunnablePlan
from offload.sizes import format_size


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """What one process has of a device."""

    pid: int
    nbytes: int | None
    """None: the driver does not say, as in containers."""


@dataclass(frozen=True, slots=True)
class DeviceLeft:
    """What is left of one device."""

    device: torch.device
    free: int
    total: int
    ours: int = 0
    """What this process holds through PyTorch's allocator."""
    others: tuple[ProcessShare, ...] = ()


def device_left(device: torch.device) -> DeviceLeft:
    """What is left of a device after PyTorch has given back what it cached (arenas.py)."""
    free, total = torch.cuda.mem_get_info(device)
    others = tuple(share for share in device_processes(device) if share.pid != os.getpid())
    return DeviceLeft(device, free, total, torch.cuda.memory_reserved(device), others)


def check_device(plan: RunnablePlan, arena: int, left: DeviceLeft) -> None:
    """Raise `MemoryTooSmall` unless the device's arena and what kernels need beside it fit now.

    Tensors that are on the device already are copied into the arena one after the other, so until
    then they take memory twice."""
    needed = max(arena, arena + plan.reserve - _moving_bytes(plan, left.device))
    if needed <= left.free:
        return
    raise MemoryTooSmall(
        f"{format_size(needed)} of {left.device} are needed ({format_size(arena)} for the arena,"
        f" {format_size(plan.reserve)} for kernels and libraries), but only"
        f" {format_size(left.free)} of its {format_size(left.total)} are free: {_holders(left)}."
        " End other programs on the device, give a smaller budget, or leave the module on the CPU"
        " before the plan runs\n\n" + plan.explain(),
        needed=needed,
        left=left.free,
    )


@contextmanager
def measuring(what: str, device: torch.device, remedy: str = "") -> Iterator[None]:
    """Raise `MemoryTooSmall` if measuring `what` needs more memory than the device has."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        left = device_left(device)
        raise MemoryTooSmall(
            f"there is too little memory on {device} to measure {what}: {format_size(left.free)} of"
            f" its {format_size(left.total)} are free: {_holders(left)}. End other programs on the"
            f" device{remedy}",
            needed=left.free + 1,  # the least it can be; the allocator does not say
            left=left.free,
        ) from error


def _holders(left: DeviceLeft) -> str:
    elsewhere = max(0, left.total - left.free - left.ours)
    parts = [f"this process has {format_size(left.ours)}"]
    for share in left.others:
        much = "an unknown part" if share.nbytes is None else format_size(share.nbytes)
        parts.append(f"process {share.pid} has {much}")
    if not left.others:
        parts.append(f"other processes and CUDA itself have {format_size(elsewhere)}")
    return ", ".join(parts)


def _moving_bytes(plan: RunnablePlan, device: torch.device) -> int:
    """Bytes of tensors that are on the device now and will live in its arena."""
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
    """Whether a source lies on the device: a tensor, or several over a storage."""
    tensor = source if isinstance(source, torch.Tensor) else next(iter(source or ()), None)
    return tensor is not None and tensor.device == device


def device_processes(device: torch.device) -> Sequence[ProcessShare]:
    """The processes on a device, if NVML's package is installed and answers."""
    if importlib.util.find_spec("pynvml") is None:
        return ()
    import pynvml  # pyright: ignore[reportMissingImports]

    try:
        pynvml.nvmlInit()
        try:
            # Look it up by its UUID: NVML numbers the machine's devices, torch only the visible
            # ones.
            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()
    return [ProcessShare(process.pid, process.usedGpuMemory) for process in processes]
