"""The first steps, twice: by the graph and by plain Lightning, from the same start.

    start --graph--> end, loss   kept aside          start --training_step, backward, step--> end
                                                              the run goes on from here
    equal to the last bit, or the run stops

The graph's turn leaves no mark: values and random numbers are put back, nothing is logged. The
user's code runs once, as it would without us.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer

from offload import OffloadError

Tensors = Mapping[str, torch.Tensor]


class DifferenceFound(OffloadError):
    """A step of the plan is not what plain Lightning does."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What a step begins with, to go back to."""

    values: Tensors
    random: torch.Tensor

    @classmethod
    def of(cls, tensors: Tensors) -> "Start":
        return cls(_copied(tensors), torch.get_rng_state())

    def restore(self, tensors: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self.values[name])
        torch.set_rng_state(self.random)


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What the graph made of a step."""

    values: Tensors
    random: torch.Tensor
    loss: torch.Tensor

    @classmethod
    def of(cls, tensors: Tensors, loss: torch.Tensor) -> "Expected":
        return cls(_copied(tensors), torch.get_rng_state(), loss)

    def compare_loss(self, eager: Any) -> None:
        loss = eager["loss"] if isinstance(eager, Mapping) else eager
        _compare({"the loss": self.loss}, {"the loss": loss.detach()})

    def compare_random(self) -> None:
        """At the micro-batch's end: hooks may draw, too."""
        if not torch.equal(self.random, torch.get_rng_state()):
            raise DifferenceFound(
                "the planned step draws other random numbers than the eager one: it was captured in"
                " another situation than this one. Give budget=None, and report the module"
            )

    def compare_state(self, tensors: Tensors) -> None:
        _compare(self.values, tensors)


def compare_gradients(
    names: Mapping[torch.nn.Parameter, str],
    sums: Mapping[torch.nn.Parameter, torch.Tensor],
    held: frozenset[torch.nn.Parameter],
) -> None:
    """Those of the micro-batches so far."""
    for p in held:
        name = f"the gradient of {names.get(p, 'a parameter')}"
        _compare({name: sums[p]}, {name: torch.zeros(()) if p.grad is None else p.grad})


def state_of(module: L.LightningModule, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """All that a step changes, by name; the tensors themselves."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    found.update(module.named_buffers())
    names: dict[Any, str] = {p: name for name, p in module.named_parameters()}
    for number, (p, state) in enumerate(optimizer.state.items()):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer.{key}.{names.get(p, number)}"] = value
    return {name: tensor.detach() for name, tensor in found.items()}


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _compare(planned: Tensors, eager: Tensors) -> None:
    for name, other in eager.items():
        ours = planned.get(name)
        if ours is None or ours.shape != other.shape or ours.dtype != other.dtype:
            raise DifferenceFound(f"{name} is there after the eager step, and not after ours")
        same = ours == other
        if other.is_floating_point() or other.is_complex():
            same |= ours.isnan() & other.isnan()
        if not bool(same.all()):
            at = int((~same).flatten().nonzero()[0])
            raise DifferenceFound(
                f"{name} differs after a planned and an eager step: element {at} of {other.numel()}"
                f" is {ours.flatten()[at].item()!r} and {other.flatten()[at].item()!r}"
                f" ({int((~same).sum())} differ)."
                " Something that the step depends on is not captured, or a kernel is not"
                " deterministic. check_first_steps=0 trains without this check"
            )
