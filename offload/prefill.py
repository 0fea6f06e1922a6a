"""Inference with weights that do not fit, one call: captured, planned, run, and all put back.

    prefill(module, x, budget="8GiB")     host   w0 w1 w2 w3 ...      each comes when its layer is
                                          device    [w1|w2|y1]        due, and nothing goes back

The module runs as it is (`eval()` is the caller's) without autograd. Its weights are clean copies
of what the host has, so none is ever copied back. For many calls keep a `Runner` of
`offload.capture` instead: here everything is captured and measured anew each time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offload.capture import Device, capture
from offload.errors import CaptureError
from offload.executor import Runner
from offload.plan import Budget, Plan, plan

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""What may stand among the tensors that a module returns."""


def prefill(
    module: torch.nn.Module,
    *inputs: torch.Tensor,
    budget: Budget = None,
    device: Device = None,
    **options: Any,
) -> Any:
    """What `module(*inputs)` returns, computed within `budget` bytes of the device.

    `device`: as of `capture`; a module may stay on the host. `options`: those of `offload.plan`.
    Containers come back as they are: lists, tuples, dicts, and what is registered as a pytree."""
    planned, structure = planned_prefill(module, *inputs, budget=budget, device=device, **options)
    with Runner(planned) as runner:
        return pytree.tree_unflatten(runner(*inputs), structure())


def planned_prefill(
    module: torch.nn.Module,
    *inputs: torch.Tensor,
    budget: Budget = None,
    device: Device = None,
    **options: Any,
) -> tuple[Plan, Callable[[], pytree.TreeSpec]]:
    """The plan of the call, and in which containers its outputs belong."""
    seen: list[pytree.TreeSpec] = []

    def step(*tensors: torch.Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            leaves, structure = pytree.tree_flatten(module(*tensors))
        for leaf in leaves:
            _check(leaf)
        seen[:] = [structure]
        return tuple(leaves)

    return plan(capture(step, *inputs, device=device), budget, **options), lambda: seen[0]


def _check(leaf: Any) -> None:
    """An object that nobody can look into may hold tensors of the trace, which have no values."""
    if not isinstance(leaf, (torch.Tensor, *PLAIN)):
        raise CaptureError(
            f"the module returns a {type(leaf).__name__}, which cannot be taken apart: return"
            " tensors in lists, tuples or dicts, or register it with"
            " torch.utils._pytree.register_pytree_node"
        )
