"""What every peer is asked for: a model with weights, a batch, and what a step is.

Whole(ids, words) -> loss, AdamW in the parameters' own type, nothing clipped
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.models import (
    GPT2_XL,
    LLAMA_7B,
    LLAMA_13B,
    TINY,
    Batch,
    Decoder,
    Kind,
    WordLoss,
    decoder,
    text,
)
from benchmarks.gpu.timing import free
from benchmarks.offloading.nets import Size

MIB, GIB = 1 << 20, 1 << 30
RANK = 16
LLAMA_3B = Size(32000, 3072, 26, 24, 8192, 1, 1024)
LLAMA_6B = Size(32000, 4096, 29, 32, 11008, 1, 1024)
LLAMA_30B = Size(32000, 6656, 60, 52, 17920, 1, 1024)


@dataclass(frozen=True, slots=True)
class Task:
    kind: Kind
    host_gib: float = 0.0
    """Of the host's memory that any peer needs for it: weights, gradients, two moments."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a peer gets."""

    task: Task
    budget: int | None
    """Bytes of the device; None: as much as there is."""
    device: str

    @property
    def kind(self) -> Kind:
        return self.task.kind


@dataclass(frozen=True, slots=True)
class Running:
    """What a peer gives: a step, again and again on the same batch."""

    step: Callable[[], torch.Tensor]
    """Returns the loss."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What it says of itself, for the table."""


class Whole(nn.Module):
    """Model and loss in one, so that whoever wraps a module has all of the step in it."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__()
        self.inner = inner
        self.loss = WordLoss(inner)

    def forward(self, ids: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.loss(self.inner(ids), words)


def whole(setup: Setup, device: str, checkpointed: bool | None = None) -> Whole:
    """With weights, on `device`. `checkpointed`: where a peer has a way of its own for that."""
    kind = setup.kind
    if checkpointed is not None:
        kind = replace(kind, checkpointed=checkpointed)
    inner = decoder(kind, device)
    if torch.cuda.is_available():
        free("cuda")  # weights are drawn there: what is cached is not left of the budget
    return Whole(inner)


def batch(setup: Setup, device: str) -> Batch:
    """The same words for every peer."""
    torch.manual_seed(1)
    return text(setup.kind.size, device)


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def eager_step(module: Whole, inputs: Batch) -> Callable[[], torch.Tensor]:
    """A training step as anybody writes it."""
    optimizer = torch.optim.AdamW(trained(module), 1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _llama(size: Size, rank: int, rows: int, length: int) -> Kind:
    return Kind(size, lora=rank, checkpointed=True).of(rows, length)


def tasks(smoke: bool) -> dict[str, Task]:
    if smoke:
        return {
            "lora": Task(Kind(TINY, lora=4, checkpointed=True)),
            "full": Task(Kind(TINY, "gpt2", checkpointed=True)),
        }
    return {
        "7B LoRA 8x1K": Task(_llama(LLAMA_7B, RANK, 8, 1024), host_gib=14),
        "GPT-2 1.5B 8x1K": Task(Kind(GPT2_XL, "gpt2", checkpointed=True).of(8, 1024), host_gib=13),
    }


def ladder(smoke: bool) -> dict[str, Task]:
    """Ever larger: which of them trains at all."""
    if smoke:
        return {"full tiny": Task(Kind(TINY, checkpointed=True))}
    return {
        "full 3B 1x1K": Task(_llama(LLAMA_3B, 0, 1, 1024), host_gib=24),
        "full 6B 1x1K": Task(_llama(LLAMA_6B, 0, 1, 1024), host_gib=47),
        "LoRA 13B 1x1K": Task(_llama(LLAMA_13B, RANK, 1, 1024), host_gib=26),
        "LoRA 32B 1x1K": Task(_llama(LLAMA_30B, RANK, 1, 1024), host_gib=62),
    }
