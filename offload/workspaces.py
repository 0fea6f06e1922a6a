"""What CUDA's libraries keep for themselves on a device, and that it is there before a step.

    cuBLAS     one workspace a thread and stream (32 MiB on Hopper, 8 MiB before)   kept
    cuBLASLt   another one (1 MiB), at the first product with a bias                kept
    cuDNN      one a call, of a size that its heuristics say                        freed at once

All come from PyTorch's allocator. Those that are kept must not come while a call is served at
planned addresses: they would take one and write there for ever. So `warm` makes them beforehand, on
the thread and the stream that kernels are started from; `kept_bytes` measures them, and they are
charged to the budget. (Newer versions of PyTorch give cuBLAS a workspace a call: nothing is kept.)

`cudnn.benchmark` chooses algorithms, and with them sizes and bits, by the clock: it is off while
kernels are measured and while a step runs, and put back afterwards.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SIDE = 64


def warm(device: torch.device) -> None:
    """On this thread, for its current stream."""
    if device.type != "cuda":
        return
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        square = torch.zeros(SIDE, SIDE, device=device)
        torch.mm(square, square)
        torch.addmm(square[0], square, square)


def kept_bytes(device: torch.device) -> int:
    """How much of the device one thread and stream keeps."""
    return _kept() if device.type == "cuda" else 0


@functools.cache
def _kept() -> int:
    """Measured once a process, before any runner of ours: others' workspaces are cleared, and must
    not be once a captured graph knows their addresses or a call is served."""
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch._C._cuda_clearCublasWorkspaces()
        before = torch.cuda.memory_allocated(device)
        warm(device)
        stream.synchronize()
        kept = torch.cuda.memory_allocated(device) - before
        torch._C._cuda_clearCublasWorkspaces()  # others' come again when they are needed
    return kept


@contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """cuDNN chooses by its heuristics alone, and the device is the current one."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.benchmark = before
