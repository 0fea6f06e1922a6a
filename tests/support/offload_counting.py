"""A module that counts its calls, and a training step of it that is captured."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from offload.tracing.capture import traced_training_step as capture_training_step

BATCH = torch.ones(4, 3), torch.tensor([0, 1, 1, 0])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls = 0
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


def train(module: nn.Module, loss: Any = functional.cross_entropy) -> Any:
    return capture_training_step(module, loss, torch.optim.SGD(module.parameters(), 0.1), *BATCH)
