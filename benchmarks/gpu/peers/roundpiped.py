"""RoundPipe: a list of stages over pinned weights, micro-batches, recomputed by stage.

First (words, angles) -> Middle, a block each -> Last (norm, loss)     what flows is a tuple
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from benchmarks.gpu.models import Decoder, Kind, WordLoss, turns
from benchmarks.gpu.peers.task import Running, Setup, batch, whole

MICRO_BATCHES = 2
Flow = tuple[torch.Tensor, ...]


class First(nn.Module):
    def __init__(self, inner: Decoder, kind: Kind) -> None:
        super().__init__()
        self.words = inner.words
        self.pairs = kind.size.width // kind.size.heads // 2
        self.places = inner.places if kind.block == "gpt2" else None

    def forward(self, ids: torch.Tensor, words: torch.Tensor) -> Flow:
        x = self.words(ids)
        if self.places is not None:
            return x + self.places.weight[: ids.shape[1]], words
        return x, words, *turns(ids.shape[1], self.pairs, x)


class Middle(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, flow: Flow) -> Flow:
        x, words, *given = flow
        return self.block(x, *given), words, *given


class Last(nn.Module):
    """Its part of the loss: the step adds up those of the micro-batches."""

    def __init__(self, inner: Decoder, parts: int) -> None:
        super().__init__()
        self.norm, self.head, self.parts = inner.norm, inner.head, parts

    def forward(self, flow: Flow) -> torch.Tensor:
        # Not kept: what runs is a copy of this module on the device, with copies of its children.
        loss = WordLoss(self)  # pyright: ignore[reportArgumentType]  # it has the head
        return loss(self.norm(flow[0]), flow[1]) / self.parts


def stages(inner: Decoder, kind: Kind, parts: int) -> nn.Sequential:
    return nn.Sequential(
        First(inner, kind), *(Middle(block) for block in inner.blocks), Last(inner, parts)
    )


@contextmanager
def waiting(setup: Setup) -> Iterator[Running]:
    """Its default would begin the next step with weights from before the update."""
    import roundpipe  # pyright: ignore[reportMissingImports]

    module = whole(setup, "cpu", checkpointed=False)
    parts = min(MICRO_BATCHES, setup.kind.size.batch)
    run = roundpipe.RoundPipeRunConfig(num_microbatch=parts)
    pipe = roundpipe.RoundPipe(stages(module.inner, setup.kind, parts), model_run_config=run)
    optimizer = torch.optim.AdamW(pipe.optim_parameters(), 1e-4, fused=True)
    inputs = batch(setup, "cpu")

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> torch.Tensor:
        loss = pipe.forward_backward(input_args=inputs)
        pipe.step(update, is_async=False)
        return loss

    yield Running(step)
    pipe.synchronize()
