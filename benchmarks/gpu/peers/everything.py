"""The ceiling: all of it on the device, eager, as anybody writes it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.peers.task import Running, Setup, batch, trained, whole


@contextmanager
def on_the_device(setup: Setup) -> Iterator[Running]:
    module = whole(setup, setup.device)
    inputs = batch(setup, setup.device)
    if not setup.task.trains:

        def prefill() -> torch.Tensor:
            with torch.no_grad():
                return module(*inputs)

        yield Running(prefill)
        return
    optimizer = torch.optim.AdamW(trained(module), 1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield Running(step)
