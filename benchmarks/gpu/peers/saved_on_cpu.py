"""`torch.autograd.graph.save_on_cpu`: what backward needs waits in pinned memory.

A checkpoint without reentry keeps its inputs where no hook of saved tensors sees them, so the
blocks are checkpointed with reentry here: the same work, and the inputs move.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.peers.task import Running, Setup, Whole, batch, trained, whole


class Spilled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        # With reentry nothing has a gradient unless an input has one: LoRA's first block has none.
        x = x if x.requires_grad else x.detach().requires_grad_()
        return checkpoint(self.inner, x, *given, use_reentrant=True)  # pyright: ignore[reportReturnType]


@contextmanager
def saved(setup: Setup) -> Iterator[Running]:
    module = whole(setup, setup.device, checkpointed=False)
    assert isinstance(module, Whole)
    module.inner.blocks = nn.ModuleList(Spilled(block) for block in module.inner.blocks)
    inputs = batch(setup, setup.device)
    optimizer = torch.optim.AdamW(trained(module), 1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with save_on_cpu(pin_memory=setup.device == "cuda"):
            hidden = module.inner(inputs[0])
        # The loss computes its pieces once more by itself: their inputs stay.
        loss = module.loss(hidden, inputs[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield Running(step)
