"""Sets the modes of torch that a step runs in, and restores them whatever happens in between."""

from collections.abc import Callable
from typing import TypeVar

import torch

from offload.torch_seams import set_cudnn_benchmark, set_grad_enabled

T = TypeVar("T")


def in_step_modes(device: str, run: Callable[[], T]) -> T:
    """Call `run()` without autograd, and without autocast on the CPU and this type of device: the
    captured kernels have the right dtypes already.

    A Ctrl-C in the `__exit__` of `torch.no_grad()` would leave autograd off. It may also come
    between two lines of a `finally`, so each mode is restored in one of its own."""
    autograd = torch.is_grad_enabled()
    on_cpu, on_device = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled(device)
    benchmark = torch.backends.cudnn.benchmark  # it would choose other workspaces than measured
    try:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_enabled(device, False)
        set_grad_enabled(False)
        set_cudnn_benchmark(False)
        return run()
    finally:
        try:
            set_grad_enabled(autograd)
        finally:
            try:
                torch.set_autocast_enabled(device, on_device)
            finally:
                try:
                    torch.set_autocast_enabled("cpu", on_cpu)
                finally:  # the property's setter is Python, so a Ctrl-C can hit it
                    set_cudnn_benchmark(benchmark)
