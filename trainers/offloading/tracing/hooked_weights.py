"""Weights that a hook computes before every forward pass: pruning, old weight_norm, spectral_norm.

    while it is traced     module.weight = weight_orig * weight_mask      the tensor is an output
    after every step       module.weight = 0.31, 0, -0.07, ...            what plain Lightning has

The attribute is another tensor after every step, so nobody watches it; the step writes it before
it reads it. Whoever looks between two steps (a pruning callback does) finds the tensor of the last
forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.torch_seams import computed_by_hooks
from trainers.offloading.tracing.side_effects import TraceNotes

MAKERS = frozenset({f"torch.nn.utils.{name}" for name in ("prune", "weight_norm", "spectral_norm")})


def hooked_weights(module: torch.nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Each such attribute: its name from the module on, the dict that holds it, its key there."""
    return [
        (f"{path}.{name}".lstrip("."), vars(part), name)
        for path, part in module.named_modules()
        for name, maker in computed_by_hooks(vars(part))
        if maker in MAKERS
    ]


@contextmanager
def put_off_hooked(module: torch.nn.Module, notes: TraceNotes) -> Iterator[None]:
    """Note the tensors that hooks set in this block, and put back those that were there."""
    before = [(path, own, name, own.get(name)) for path, own, name in hooked_weights(module)]
    try:
        yield
        for path, own, name, then in before:
            if own.get(name) is not then:
                notes.call(path, lambda new, o=own, n=name: o.update({n: new}), (own[name],), {})
    finally:
        for _, own, name, then in before:
            own[name] = then
