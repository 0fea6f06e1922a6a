"""Runs a module once with weights that do not fit: it captures, plans, runs and puts all back.

    prefill(module, x, budget="8GiB")     host   w0 w1 w2 w3 ...      a weight comes when its layer
                                          device    [w1|w2|y1]        needs it; nothing goes back

The module runs as it is, without autograd; calling `eval()` is the caller's business. Its weights
are never copied back, because the host has the same bytes. For many calls keep a `Runner` of
`offload.capture` instead: this function captures and measures anew each time.
"""

from collections.abc import Callable
from typing import Any

import torch

from offload.errors import CaptureError
from offload.plans.plan import Budget, Plan, plan
from offload.running.runner import Runner
from offload.torch_seams import pytree
from offload.tracing.capture import Device, capture

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Types of what a module may return besides tensors."""


def prefill(
    module: torch.nn.Module,
    *inputs: torch.Tensor,
    budget: Budget = None,
    device: Device = None,
    **options: Any,
) -> Any:
    """Compute `module(*inputs)` within `budget` bytes of the device, and return its result.

    `device`: see `capture`; the module may stay on the host. `options`: those of `offload.plan`.
    Containers are returned as they are: lists, tuples, dicts, and registered pytree nodes."""
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
    """The plan of the call, and a function that gives the containers of its outputs."""
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
    """Refuse an opaque object: it may hold tensors of the trace, which have no values."""
    if not isinstance(leaf, (torch.Tensor, *PLAIN)):
        raise CaptureError(
            f"the module returns a {type(leaf).__name__}, and capture cannot look into it. Return"
            " tensors in lists, tuples or dicts, or register the class with"
            " torch.utils._pytree.register_pytree_node"
        )
