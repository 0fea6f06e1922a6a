"""GPT-2 (Radford et al. 2019): pre-norm blocks, and one matrix for both embedding and head.

    ids -> words + positions -> dropout -> [x + attention(norm x), x + mlp(norm x)] * layers
        -> norm -> words again, transposed: a logit for each entry of the vocabulary

    gpt2_small  12 layers  768 wide  124.4 M      gpt2_large  36 layers  1280 wide    774.0 M
    gpt2_medium 24 layers 1024 wide  354.8 M      gpt2_xl     48 layers  1600 wide  1,557.6 M
    gpt2_tiny    2 layers   64 wide, 128 positions: for two CPU cores

Weights start as in the paper: they are normal with deviation 0.02. Where a block adds to the
residual stream, the deviation is divided by the root of the number of such additions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Gpt2Shape:
    layers: int
    heads: int
    width: int
    positions: int = 1024


GPT2_SHAPES: Mapping[str, Gpt2Shape] = MappingProxyType(
    {
        "gpt2_tiny": Gpt2Shape(layers=2, heads=4, width=64, positions=128),
        "gpt2_small": Gpt2Shape(layers=12, heads=12, width=768),
        "gpt2_medium": Gpt2Shape(layers=24, heads=16, width=1024),
        "gpt2_large": Gpt2Shape(layers=36, heads=20, width=1280),
        "gpt2_xl": Gpt2Shape(layers=48, heads=25, width=1600),
    }
)


class Gpt2Attention(nn.Module):
    def __init__(self, shape: Gpt2Shape, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gpt2Block(nn.Module):
    def __init__(self, shape: Gpt2Shape, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Gpt2Attention(shape, dropout)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        wide = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.drop(self.down(wide))


class Gpt2(nn.Module):
    """Maps ids [batch, sequence] to logits [batch, sequence, vocabulary]."""

    adapted = ("qkv", "up", "down")
    """LoRA adapts these matrices: queries, keys and values (one matrix here), and feed-forward."""

    def __init__(self, shape: Gpt2Shape, vocabulary: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Gpt2Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        self.head.weight = self.words.weight
        self._draw_weights(shape)

    def _draw_weights(self, shape: Gpt2Shape) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                deviation = DEVIATION / math.sqrt(2 * shape.layers) if residual else DEVIATION
                nn.init.normal_(parameter, std=deviation)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.words(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
