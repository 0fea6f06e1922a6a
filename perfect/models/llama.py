"""LLaMA (Touvron et al. 2023): a decoder with RMS norms, rotary positions and a gated feed-forward.

    ids -> words -> [x + attention(norm x), x + down(silu(gate(norm x)) * up(norm x))] * layers
        -> norm -> head: a matrix of its own, unlike in GPT-2

    llama_7b    32 layers, 4096 wide, 11008 inside: 6.74 G parameters with 32,000 words
    llama_tiny   2 layers,  128 wide,   344 inside: for two CPU cores

There are no biases and no dropout. A rotation pairs a number of a head's first half with one of its
second half, not with its neighbour. Checkpoints that transformers reads do the same, so they fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class LlamaShape:
    layers: int
    heads: int
    width: int
    inside: int
    """The width of the feed-forward part."""
    rotary_base: float = 10_000.0
    epsilon: float = 1e-6


LLAMA_SHAPES: Mapping[str, LlamaShape] = MappingProxyType(
    {
        "llama_tiny": LlamaShape(layers=2, heads=4, width=128, inside=344),
        "llama_7b": LlamaShape(layers=32, heads=32, width=4096, inside=11008),
    }
)


def rotations(length: int, shape: LlamaShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angle of each position and pair: [length, width of a head]."""
    side = shape.width // shape.heads
    pairs = torch.arange(0, side, 2, device=device, dtype=torch.float32)
    places = torch.arange(length, device=device, dtype=torch.float32)
    angles = places[:, None] * shape.rotary_base ** (-pairs / side)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cosine + turned * sine).to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k, v = (
            made(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for made in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.attention = LlamaAttention(shape)
        self.norm2 = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.gate = nn.Linear(shape.width, shape.inside, bias=False)
        self.up = nn.Linear(shape.width, shape.inside, bias=False)
        self.down = nn.Linear(shape.inside, shape.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cosine, sine)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Maps ids [batch, sequence] to logits [batch, sequence, vocabulary]."""

    adapted = ("q", "k", "v", "gate", "up", "down")
    """LoRA adapts these matrices, as in section 5 of DISCO."""

    def __init__(self, shape: LlamaShape, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=DEVIATION)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        cosine, sine = rotations(ids.shape[1], self.shape, ids.device)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))
