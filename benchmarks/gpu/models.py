"""The models of the suite, and how they get weights without a second copy of them.

    meta -> adapted -> empty on its device -> drawn in place, on the GPU where there is one

So 13 G parameters cost their 26 GB of memory and seconds, not minutes: torch's own beginning of
weights would draw them twice, on one core. What is drawn depends on the seed and the kind of device
alone, so two models of one case begin equal wherever their weights lie.

The language models return hidden states. `WordLoss` has the head in it and takes the words in
pieces, computed once more in the backward pass: 32,768 x 32,000 logits never exist, for nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.offloading.nets import GptBlock, LlamaBlock, Size

DEVIATION = 0.02
PIECE = 2048
"""Words whose logits are there at once."""

GPT2 = Size(50257, 768, 12, 12, 3072, 8, 1024)
GPT2_XL = Size(50257, 1600, 48, 25, 6400, 8, 1024)
LLAMA_7B = Size(32000, 4096, 32, 32, 11008, 8, 1024)
LLAMA_13B = Size(32000, 5120, 40, 40, 13824, 1, 1024)
TINY = Size(128, 64, 2, 4, 128, 2, 16)
ADAPTED = ("qkv", "out", "gate", "up", "down")
"""The matrices that LoRA adapts: all of a block."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Which language model, and what of it is trained."""

    size: Size
    block: str = "llama"
    """llama or gpt2"""
    lora: int = 0
    """Rank; 0: everything is trained."""
    checkpointed: bool = False
    """Blocks are computed once more in the backward pass, by torch: the user's choice."""
    dropout: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    def of(self, rows: int, length: int) -> "Kind":
        return replace(self, size=replace(self.size, batch=rows, length=length))

    @property
    def tokens(self) -> int:
        return self.size.batch * self.size.length


class Lora(nn.Module):
    """A frozen matrix, and a learned one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        kind = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.a = nn.Parameter(torch.empty(rank, base.in_features, **kind))
        self.b = nn.Parameter(torch.empty(base.out_features, rank, **kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        learned = functional.linear(functional.linear(x, self.a), self.b)
        return self.base(x) + 2.0 * learned


class Again(nn.Module):
    """What it holds is computed once more in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        # Nothing in it draws: a generator's state need not be read, which would cut the step.
        return checkpoint(  # pyright: ignore[reportReturnType]
            self.inner, *given, use_reentrant=False, preserve_rng_state=False
        )


class Decoder(nn.Module):
    """Ids [rows, length] -> hidden states [rows, length, width]."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        size = kind.size
        assert not (kind.checkpointed and kind.dropout), "a checkpoint keeps no generator's state"
        self.kind = kind.block
        self.pairs = size.width // size.heads // 2
        self.words = nn.Embedding(size.words, size.width)
        if kind.block == "gpt2":
            self.places = nn.Embedding(max(1024, size.length), size.width)
            made: list[nn.Module] = [GptBlock(size, kind.dropout) for _ in range(size.depth)]
        else:
            made = [LlamaBlock(size) for _ in range(size.depth)]
        if kind.lora:
            self.requires_grad_(False)
            for block in made:
                adapt(block, kind.lora)
        self.blocks = nn.ModuleList([Again(b) if kind.checkpointed else b for b in made])
        self.norm = nn.LayerNorm(size.width) if kind.block == "gpt2" else nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        if kind.block == "gpt2":
            self.head.weight = self.words.weight
        if kind.lora:
            self.norm.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        given: tuple[torch.Tensor, ...] = ()
        if self.kind == "gpt2":
            x = x + self.places.weight[: ids.shape[1]]
        else:
            given = turns(ids.shape[1], self.pairs, x)
        for block in self.blocks:
            x = block(x, *given)
        return self.norm(x)


def turns(length: int, half: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the rotary angles."""
    pairs = torch.arange(half, device=like.device, dtype=torch.float32) / half
    places = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = places[:, None] * 1e4**-pairs
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def adapt(block: nn.Module, rank: int) -> None:
    block.requires_grad_(False)
    for name, child in list(block.named_children()):
        if name in ADAPTED and isinstance(child, nn.Linear):
            setattr(block, name, Lora(child, rank))


class LastWord(nn.Module):
    """What a prefill is asked for: the logits of the next word."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner.head(self.inner(ids)[:, -1])


class WordLoss:
    """Of hidden states and the words that follow."""

    def __init__(self, decoder: Decoder) -> None:
        self.head = decoder.head

    def __call__(self, hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        pieces = zip(hidden.flatten(0, 1).split(PIECE), words.flatten().split(PIECE), strict=True)
        again = partial(checkpoint, self.piece, use_reentrant=False, preserve_rng_state=False)
        losses = [again(h, w) for h, w in pieces]
        return torch.stack(losses).sum() / words.numel()  # pyright: ignore[reportArgumentType]

    def piece(self, hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(hidden).float(), words, reduction="sum")


def decoder(kind: Kind, device: str, seed: int = 0) -> Decoder:
    """With weights, on `device`."""
    with torch.device("meta"):
        made = Decoder(kind).to(kind.dtype)
    # Two names of one tensor (GPT-2's words and head) stay one: Module.to_empty keeps ties.
    made = made.to_empty(device=device)
    fill(made, seed)
    return made


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Draws every weight, in place."""
    there = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator(there).manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith(".b"):
            weight.zero_()  # LoRA begins as what it adapts
        elif weight.device.type == there:
            weight.normal_(std=DEVIATION, generator=draw)
        else:
            drawn = torch.empty(weight.shape, dtype=weight.dtype, device=there)
            weight.copy_(drawn.normal_(std=DEVIATION, generator=draw))


def adamw(model: nn.Module, rate: float = 1e-4) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, rate, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how it is trained, and batches for it. All of them on the device that is named."""

    build: Callable[[str], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[str], Batch]
    """From torch's own generator: seed it."""
    loss: Callable[[nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]
    setting: str


def language(kind: Kind) -> Case:
    what = f"LoRA of rank {kind.lora}" if kind.lora else "all of it"
    return Case(
        lambda device: decoder(kind, device), adamw, lambda device: text(kind.size, device),
        lambda model: WordLoss(_decoder_of(model)),
        f"{kind.block}, {kind.size}, {what}, {str(kind.dtype).rpartition('.')[2]}"
        f"{', blocks checkpointed' if kind.checkpointed else ''}, AdamW",
    )  # fmt: skip


def _decoder_of(model: nn.Module) -> Decoder:
    assert isinstance(model, Decoder)
    return model


def text(size: Size, device: str) -> Batch:
    """Drawn on the CPU: the same words wherever they go."""
    return tuple(part.to(device) for part in size.text())
