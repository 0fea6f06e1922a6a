"""The seeds of a fused attention's dropout, which torch keeps on the host and a plan on the device.

    forward    attention -> out, .., seed (a CPU tensor)  --fill-->  seed in its planned bytes
    backward   seed in its planned bytes  --copy-->  a CPU tensor -> attention's backward

Torch's memory efficient attention returns seed and offset on the CPU, and its backward reads them
there. Only while its stream is captured into a CUDA graph are both on the device. Fakes say "on the
device" for both, so a plan treats them as any other buffer. The copy back to the host waits for the
device; it is made only where dropout draws outside of a CUDA graph. (Flash attention always keeps
its seeds on the device.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offload.torch_seams import SEEDED_BACKWARD, SEEDED_FORWARD, schema_of

SEEDS = ("philox_seed", "philox_offset")
CHANCE = "dropout_p"


def with_seeds(op: Any) -> Callable[..., Any]:
    """What a step on a GPU calls for an op."""
    name = schema_of(op).name.split("::")[1]
    if name not in SEEDED_FORWARD | SEEDED_BACKWARD:
        return op
    if name in SEEDED_FORWARD:
        return SeedsOut(op)
    names = [argument.name for argument in schema_of(op).arguments]
    return SeedsIn(op, tuple(names.index(seed) for seed in SEEDS), names.index(CHANCE))


@dataclass(frozen=True, slots=True)
class SeedsOut:
    """Calls the op and moves all its results to the device of the first."""

    op: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        results = self.op(*args, **kwargs)
        device = results[0].device
        return tuple(
            _filled(found, device) if _elsewhere(found, device) else found for found in results
        )


@dataclass(frozen=True, slots=True)
class SeedsIn:
    """Calls the op with the seeds on the CPU, where it reads them."""

    op: Callable[..., Any]
    seeds: tuple[int, ...]
    """Positions of the seeds among the arguments."""
    chance: int
    """Position of the dropout probability among the arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args[self.chance] and not _capturing(args[0].device):
            args = tuple(a.cpu() if n in self.seeds else a for n, a in enumerate(args))
        return self.op(*args, **kwargs)


def _elsewhere(found: Any, device: torch.device) -> bool:
    return isinstance(found, torch.Tensor) and found.device != device


def _filled(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Write the number by a kernel: a copy from the host would wait for the device."""
    return torch.full((), int(number), dtype=number.dtype, device=device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
