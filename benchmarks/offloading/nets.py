"""GPT-2 (tied weights, dropout), its blocks, and those of a LLaMA-style stack."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """Of a language model, and of its batch."""

    words: int
    width: int
    depth: int
    heads: int
    inner: int
    batch: int
    length: int

    def text(self) -> Batch:
        text = torch.randint(0, self.words, (self.batch, self.length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def __str__(self) -> str:
        return f"{self.depth} layers of {self.width}, {self.batch} x {self.length} tokens"


class Gpt(nn.Module):
    """GPT-2: dropout, and one matrix for reading and writing words."""

    def __init__(self, size: Size, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(max(1024, size.length), size.width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GptBlock(size, dropout) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(text) + self.places.weight[: text.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GptBlock(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        width, self.heads, self.dropout = size.width, size.heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, size.inner), nn.GELU("tanh"), nn.Linear(size.inner, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm2(x)))


class LlamaBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, size.inner, bias=False)
        self.up = nn.Linear(width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            _turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
