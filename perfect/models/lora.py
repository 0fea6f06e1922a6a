"""LoRA (Hu et al. 2021): a frozen matrix, and a learned one of low rank beside it.

x --> W (frozen) -----------> + --> y        A: rank x in, random    B: out x rank, zero
 \\--> A --> B * alpha/rank --/               so the first y is the frozen one, bit for bit
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional


class LoraLinear(nn.Module):
    """The frozen layer `base`, plus a learned matrix of rank `rank`."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        kind = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.a = nn.Parameter(torch.empty(rank, base.in_features, **kind))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, **kind))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        learned = functional.linear(functional.linear(x, self.a), self.b)
        return self.base(x) + learned * self.scale


def add_lora(model: nn.Module, names: Collection[str], rank: int, alpha: float) -> None:
    """Freeze `model`, and adapt each linear layer in it whose name is one of `names`."""
    model.requires_grad_(False)
    # The loop changes the tree, so it walks over lists.
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, LoraLinear(child, rank, alpha))
