"""The models that are measured, how they are trained, and batches for them.

ResNet18, ViT-B/16 from torchvision; GPT-2-small written here (tied weights, dropout) and, where
transformers is installed, Hugging Face's; a LLaMA-style stack. The optimizers are torch's fused
ones: the fastest that eager has is what we are compared with.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how it is trained, and batches for it."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[], Batch]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    setting: str


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


GPT2_SMALL = Size(50257, 768, 12, 12, 3072, 2, 64)
LLAMA = Size(8192, 512, 4, 8, 1376, 2, 128)
TINY = Size(128, 64, 2, 4, 128, 2, 16)


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


class Llama(nn.Module):
    """RMSNorm, rotary places, SwiGLU; matrix products in bfloat16 if asked."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        half = size.width // size.heads // 2
        angle = torch.outer(torch.arange(size.length), 1e4 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


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


def word_loss(logits: Any, target: torch.Tensor) -> torch.Tensor:
    logits = getattr(logits, "logits", logits)
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4, nesterov=True, fused=True
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def pictures(count: int, pixels: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(count, 3, pixels, pixels), torch.randint(0, 10, (count,)))


def cases(smoke: bool) -> dict[str, Case]:
    """By name. The small ones for a test say nothing of the large."""
    gpt, llama = (TINY, TINY) if smoke else (GPT2_SMALL, LLAMA)
    count, pixels = (2, 32) if smoke else (32, 32)
    entropy = functional.cross_entropy
    found = {
        "resnet18": Case(
            _resnet18, sgd, pictures(count, pixels),
            entropy, f"{count} x {pixels} x {pixels}, SGD momentum",
        ),
        "vit-b-16": Case(
            lambda: _vit(smoke), adamw, pictures(2, 32 if smoke else 224), entropy,
            f"2 x {32 if smoke else 224} x {32 if smoke else 224}, AdamW",
        ),
        "gpt2-small": Case(lambda: Gpt(gpt), adamw, gpt.text, word_loss, f"{gpt}, AdamW"),
        "llama": Case(lambda: Llama(llama), adamw, llama.text, word_loss, f"{llama}, AdamW"),
    }  # fmt: skip
    if importlib.util.find_spec("transformers"):
        found["gpt2-small-hf"] = Case(
            lambda: huggingface(gpt), adamw, gpt.text, word_loss, f"{gpt}, AdamW"
        )
    return found


def _resnet18() -> nn.Module:
    import torchvision  # its models alone need it: a machine may have none

    return torchvision.models.resnet18(num_classes=10)


def _vit(smoke: bool) -> nn.Module:
    import torchvision

    if not smoke:
        return torchvision.models.vit_b_16(num_classes=10)
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64,
        num_classes=10,
    )  # fmt: skip


def huggingface(size: Size) -> nn.Module:
    import transformers  # pyright: ignore[reportMissingImports]

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=size.depth, n_embd=size.width, n_head=size.heads, vocab_size=size.words,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip
