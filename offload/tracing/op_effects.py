"""Which of its tensors an op reads, which it writes in place, and how much it computes.

The schema of an op says so, with these exceptions: ops that overwrite a tensor without reading it,
batch norms, which change their statistics unseen, collectives (collectives.py), and ops that only
give a tensor another shape.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from offload.program.trees import tensors_of
from offload.torch_seams import packet_of
from offload.tracing.collectives import written_by_collective
from offload.tracing.draws import arguments

WHOLE = frozenset(
    {"fill_", "zero_", "copy_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"}
    | {"geometric_", "cauchy_", "log_normal_"}
)
"""Ops that overwrite their first argument without reading it."""
STATISTICS = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"}
    | {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
)
"""Ops that write `running_mean` and `running_var` although their schema does not say so."""
ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
"""Ops that only make memory."""
RESIZING = frozenset({"resize_", "set_", "resize_as_", "resize", "set"})
RELAYING = frozenset(
    {"as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
)
"""Ops that make a tensor a view of itself. They change its shape and strides, but no bytes."""


def allocates(name: str) -> bool:
    return name in ALLOCATIONS


def relays(name: str) -> bool:
    return name in RELAYING


def resizes(name: str, args: Sequence[Any]) -> bool:
    """Whether an op changes the size of its first argument. An op with `out=` resizes that to the
    size that is there."""
    if name not in RESIZING:
        return False
    own = tuple(args[0].size())
    size = {"resize_": lambda: tuple(args[1]), "resize_as_": lambda: tuple(args[1].size())}
    return name not in size or size[name]() != own


def written_arguments(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that an op writes in place."""
    written = written_by_collective(func, args)
    hidden = name in STATISTICS
    for argument, given in arguments(func, args, kwargs):
        if hidden and argument.name == "training" and not given:
            return []
        statistics = hidden and argument.name in ("running_mean", "running_var")
        if statistics or (argument.alias_info is not None and argument.alias_info.is_write):
            written += tensors_of(given)
    return written


def read_arguments(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that an op reads: all but those whose storage it overwrites completely."""
    read: list[torch.Tensor] = []
    for position, (argument, given) in enumerate(arguments(func, args, kwargs)):
        anew = argument.is_out or (position == 0 and name in WHOLE)
        read += [t for t in tensors_of(given) if not (anew and _covers(t))]
    return read


def _covers(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers every byte of its storage."""
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return whole and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """The floating-point operations of a call; 0 for an op that torch counts none of."""
    formula = flop_registry.get(packet_of(func))
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
