"""What a step calls for an op of the trace: the op itself, but for a few kernels.

attention with dropout on a GPU    its seeds come to the device and back (seeds.py)
an LSTM of a CPU                   its kernel keeps a workspace only where autograd is on
a collective                       all ranks wait for it (collectives.py)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offload.torch_seams import ASKING_AUTOGRAD, schema_of, set_grad_enabled
from offload.tracing.collectives import Collective, is_collective
from offload.tracing.seeds import with_seeds


def at_run_time(op: Any, device: torch.device, autograd: bool = False) -> Callable[..., Any]:
    """What a step on this device calls for an op. `autograd`: whether it was on in the trace."""
    if is_collective(op):
        return Collective(op)
    if autograd and schema_of(op).name.split("::")[1] in ASKING_AUTOGRAD:
        return WithAutograd(op)
    return with_seeds(op) if device.type == "cuda" else op


@dataclass(frozen=True, slots=True)
class WithAutograd:
    """Calls the op with autograd on, as it was in the trace. No argument requires a gradient, so
    autograd keeps nothing."""

    op: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        set_grad_enabled(True)
        try:
            return self.op(*args, **kwargs)
        finally:
            set_grad_enabled(before)
