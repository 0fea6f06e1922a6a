"""torchao's CPUOffloadOptimizer: gradients go to the host while backward runs, AdamW runs there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.peers.task import Running, Setup, batch, trained, whole


@contextmanager
def stepped(setup: Setup) -> Iterator[Running]:
    from torchao.optim import CPUOffloadOptimizer  # pyright: ignore[reportMissingImports]

    module = whole(setup, setup.device)
    inputs = batch(setup, setup.device)
    # Gradients leave the device as they are there: no accumulation here needs them.
    optimizer = CPUOffloadOptimizer(
        trained(module), torch.optim.AdamW, offload_gradients=True, fused=True, lr=1e-4
    )

    def step() -> torch.Tensor:
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    yield Running(step)
