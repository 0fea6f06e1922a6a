"""The arithmetic of gradient clipping, one gradient at a time.

torch.nn.utils clips with foreach kernels, which treat each tensor of their lists on its own. So a
call with a list of one gives the same bits, and each gradient can have a task of its own.
"""

from collections.abc import Sequence

import torch

from offload.torch_seams import foreach_clamp_max_, foreach_clamp_min_, foreach_mul_, foreach_norm

EPSILON = 1e-6
"""The epsilon of `torch.nn.utils.clip_grad_norm_`."""


def norm_of(g: torch.Tensor) -> torch.Tensor:
    return foreach_norm([g], 2.0)[0]


def factor_of(norms: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
    first = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), 2.0)
    return torch.clamp(float(limit) / (total + EPSILON), max=1.0)


def scale(g: torch.Tensor, factor: torch.Tensor) -> None:
    foreach_mul_([g], factor.to(g.device))


def clamp(g: torch.Tensor, limit: float) -> None:
    foreach_clamp_min_([g], -float(limit))
    foreach_clamp_max_([g], float(limit))


def divide(g: torch.Tensor, total: torch.Tensor, count: torch.Tensor) -> None:
    """g = total / count. On a CPU these are the bits of `total.div(n)` for the number n. A GPU
    divides here, where `total.div(n)` multiplies by 1 / n there; so all devices have equal bits."""
    torch.div(total, count, out=g)
