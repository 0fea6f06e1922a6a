"""Memory that CUDA's libraries keep on a device, and how it is taken before a step.

    cuBLAS     one workspace a thread and stream (32 MiB on Hopper, 8 MiB before)   kept
    cuBLASLt   another one (1 MiB), at the first product with a bias                kept
    cuDNN      one a call; its heuristics choose the size                           freed at once

All of it comes from PyTorch's allocator. A library must not take a lasting workspace while a call
is served at planned addresses: it would get one of those and keep writing there. So `warm` makes
these workspaces beforehand, on the thread and the stream that start kernels. `kept_bytes` measures
them, and the budget pays for them. (Newer versions of PyTorch give cuBLAS a workspace a call and
keep none.)

`cudnn.benchmark` chooses algorithms by the clock, and they decide sizes and bits. So it is off
while kernels are measured and while a step runs, and put back afterwards.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.memory.collector import collector_paused
from offload.torch_seams import clear_cublas_workspaces, set_cudnn_benchmark

SIDE = 64


def warm(device: torch.device) -> None:
    """Make the workspaces of this thread and its current stream."""
    if device.type != "cuda":
        return
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        square = torch.zeros(SIDE, SIDE, device=device)
        torch.mm(square, square)
        torch.addmm(square[0], square, square)


def kept_bytes(device: torch.device) -> int:
    """How many bytes of a device the libraries keep for one thread and stream."""
    return _measure_kept() if device.type == "cuda" else 0


@functools.cache
def _measure_kept() -> int:
    """Measure once a process, before any runner exists: measuring clears all workspaces, and that
    must not happen once a captured graph knows their addresses or while a call is served."""
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), collector_paused():  # garbage freed meanwhile would count
        clear_cublas_workspaces()
        before = torch.cuda.memory_allocated(device)
        warm(device)
        stream.synchronize()
        kept = torch.cuda.memory_allocated(device) - before
        clear_cublas_workspaces()  # libraries make them again when they need them
    return kept


@contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """Let cuDNN choose by its heuristics alone, and make the device the current one."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cudnn.benchmark
    set_cudnn_benchmark(False)
    try:
        with torch.cuda.device(device):
            yield
    finally:
        set_cudnn_benchmark(before)
