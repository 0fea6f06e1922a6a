"""Sets the modes of torch that a step runs in, and restores them whatever happens in between."""

from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

import torch

from offload.torch_seams import set_cudnn_benchmark, set_grad_enabled

T = TypeVar("T")


def in_step_modes(devices: Collection[str], run: Callable[[], T]) -> T:
    """Call `run()` without autograd, and without autocast on these device types: the captured
    kernels have the right dtypes already."""
    inner = partial(_without_autograd, run)
    for kind in sorted({"cpu", *devices}):
        inner = partial(_without_autocast, kind, inner)
    return inner()


def _without_autograd(run: Callable[[], T]) -> T:
    """Call `run()` without autograd. A Ctrl-C in the `__exit__` of `torch.no_grad()` would leave
    autograd off; a plain call in a `finally` cannot be interrupted before it has run."""
    autograd = torch.is_grad_enabled()
    benchmark = torch.backends.cudnn.benchmark  # it would choose other workspaces than measured
    try:
        set_grad_enabled(False)
        set_cudnn_benchmark(False)
        return run()
    finally:
        try:
            set_grad_enabled(autograd)
        finally:  # for a Ctrl-C between the two; the property's setter is Python and can be hit
            set_cudnn_benchmark(benchmark)


def _without_autocast(kind: str, run: Callable[[], T]) -> T:
    before = torch.is_autocast_enabled(kind)
    try:
        torch.set_autocast_enabled(kind, False)
        return run()
    finally:
        torch.set_autocast_enabled(kind, before)
