"""Optimizers as users write them."""

from typing import Any

import torch
from torch.optim import Adam, Optimizer


class Simple(Optimizer):
    """What most of them have in common."""

    def __init__(self, params: Any, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    def each(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p, self.state[p]


class Lion(Simple):
    """A sign, a counter that is a Python number, and a branch on it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, p, state in self.each(closure):
            if not state:
                state["step"] = 0
                state["mean"] = torch.zeros_like(p)
            state["step"] += 1
            size = group["lr"] / (2 if state["step"] % 3 == 0 else 1)
            p.add_(torch.sign(state["mean"] * 0.9 + p.grad * 0.1), alpha=-size)
            if state["step"] > 4:
                state["mean"].mul_(0.99).add_(p.grad, alpha=0.01)
            else:
                state["mean"].copy_(p.grad)


class Slow(Simple):
    """State that begins as the parameter, and a state whose tensor is another one every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, p, state in self.each(closure):
            if "slow" not in state:
                state["slow"] = p.clone()
                state["mean"] = torch.zeros_like(p)
            p.grad.mul_(0.5)  # in place
            state["mean"] = state["mean"] * 0.9 + p.grad
            p.sub_(state["mean"], alpha=group["lr"])
            state["slow"].lerp_(p, 0.25)
            p.copy_(state["slow"])


class Trusting(Simple):
    """A number of the whole parameter: no piece of it can be updated alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, p, state in self.each(closure):
            if not state:
                state["mean"] = torch.zeros_like(p)
            state["mean"].mul_(0.9).add_(p.grad)
            p.sub_(state["mean"] * (p.norm() / (state["mean"].norm() + 1e-6)) * group["lr"])


class Warm(Adam):
    """A subclass of torch's with a step of its own around torch's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad.clamp(-0.01, 0.01)
        return super().step(closure)


class Beginning(Simple):
    """A number in the state that does not begin with 0."""

    def step(self, closure: Any = None) -> Any:
        for group, p, state in self.each(closure):
            state["step"] = state.get("step", 7) + 1
            state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.data.add_(state["mean"], alpha=-group["lr"] / state["step"])


class Named(Adam):
    """A subclass that changes nothing."""


class Branching(Simple):
    def step(self, closure: Any = None) -> Any:
        for group, p, _ in self.each(closure):
            if p.grad.abs().max() > 1:
                p.grad.zero_()
            p.data.add_(p.grad, alpha=-group["lr"])


class Together(Simple):
    def step(self, closure: Any = None) -> Any:
        norms = torch.stack([p.grad.norm() for _, p, _ in self.each(closure)]).norm()
        for group, p, _ in self.each():
            p.data.sub_(p.grad / norms * group["lr"])
