"""The seeds of a fused attention's dropout: on the host for torch, on the device for a plan.

    forward    attention -> out, .., seed (a CPU tensor)  --fill-->  seed in its planned bytes
    backward   seed in its planned bytes  --copy-->  a CPU tensor -> attention's backward

Torch's memory efficient attention returns seed and offset on the CPU, and its backward reads them
there, unless its stream is being captured into a CUDA graph: then both are on the device. Fakes say
"on the device" for both, so in between they are buffers like any other. The copy back to the host
waits for the device; it is made only where dropout draws, outside of a CUDA graph. (Flash attention
keeps its seeds on the device anyway.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FORWARD = frozenset({"_scaled_dot_product_efficient_attention", "_efficient_attention_forward"})
BACKWARD = frozenset(
    {"_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"}
)
SEEDS = ("philox_seed", "philox_offset")
CHANCE = "dropout_p"


def at_run_time(op: Any, device: torch.device) -> Callable[..., Any]:
    """What to call for an op of a step on this device."""
    name = op._schema.name.split("::")[1]
    if device.type != "cuda" or name not in FORWARD | BACKWARD:
        return op
    if name in FORWARD:
        return SeedsOut(op)
    names = [argument.name for argument in op._schema.arguments]
    return SeedsIn(op, tuple(names.index(seed) for seed in SEEDS), names.index(CHANCE))


@dataclass(frozen=True, slots=True)
class SeedsOut:
    """The op, with all its results on the device of the first."""

    op: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        results = self.op(*args, **kwargs)
        device = results[0].device
        return tuple(
            _filled(found, device) if _elsewhere(found, device) else found for found in results
        )


@dataclass(frozen=True, slots=True)
class SeedsIn:
    """The op, with seeds where it reads them."""

    op: Callable[..., Any]
    seeds: tuple[int, ...]
    """Positions of them among the arguments."""
    chance: int
    """Of dropout."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args[self.chance] and not _capturing(args[0].device):
            args = tuple(a.cpu() if n in self.seeds else a for n, a in enumerate(args))
        return self.op(*args, **kwargs)


def _elsewhere(found: Any, device: torch.device) -> bool:
    return isinstance(found, torch.Tensor) and found.device != device


def _filled(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A kernel that writes it: a copy from the host would wait."""
    return torch.full((), int(number), dtype=number.dtype, device=device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
