"""The same training twice: by an optimizer in eager mode, and by plans of its steps."""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from support.live_training import LiveTraining, training_graph
from torch import nn, optim

from offload import Plan, TaskGraph

STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 60), nn.ReLU(), nn.Linear(60, 1, bias=False))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(number)
    return torch.randn(8, 70, generator=dice), torch.randn(8, 1, generator=dice)


loss_of = nn.functional.mse_loss


@dataclass
class Twins:
    """The same training, eagerly and as plans."""

    eager: nn.Module
    ours: nn.Module
    eager_optimizer: Any
    our_optimizer: Any
    step: int = 0
    first: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, make: Any) -> "Twins":
        one, other = net(), net()
        return cls(one, other, make(one), make(other))

    def graph(self) -> TaskGraph:
        return training_graph(self.ours, loss_of, self.our_optimizer, *batch(0))

    def stepping(self, plan: Plan | None = None, **how: Any) -> LiveTraining:
        return LiveTraining(self.ours, loss_of, self.our_optimizer, plan, **how)

    def eagerly(self, size: int = 8) -> None:
        x, y = (t[:size] for t in batch(self.step))
        self.eager_optimizer.zero_grad()
        loss_of(self.eager(x), y).backward()
        self.eager_optimizer.step()

    def both(self, ours: LiveTraining, size: int = 8) -> None:
        """One step of each, with another learning rate, and compare all that there is."""
        for optimizer in (self.eager_optimizer, self.our_optimizer):
            for group in optimizer.param_groups:
                rate = 0.01 * (1 + 0.3 * math.sin(self.step))
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        self.eagerly(size)
        ours(*(t[:size] for t in batch(self.step)))
        self.step += 1
        self.compare()

    def run(self, plan: Plan, steps: int = STEPS, engine: str = "threads") -> None:
        order = "priority" if engine == "serial" else "random"
        how: dict[str, Any] = {"engine": engine, "order": order, "seed": self.step}
        with self.stepping(plan, poison=True, **how) as ours:
            for _ in range(steps):
                self.both(ours)
        self.compare()

    def compare(self) -> None:
        for (name, p), q in zip(self.ours.named_parameters(), self.eager.parameters(), strict=True):
            assert torch.equal(p, q), f"{name} after step {self.step}"
        ours, eager = self.our_optimizer.state_dict(), self.eager_optimizer.state_dict()
        assert same(ours, eager), f"after step {self.step}"


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, in type and in order."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def made_by(kind: Any, more: dict[str, Any]) -> Any:
    def make(module: nn.Module) -> Any:
        chosen = [p for p in module.parameters() if kind is not optim.Muon or p.dim() == 2]
        return kind(chosen, **copy.deepcopy(more))

    return make
