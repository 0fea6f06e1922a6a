"""The first steps, twice: by the graph and by plain Lightning, from the same start.

    start --graph--> end, loss   kept aside          start --training_step, backward, step--> end
                                                              the run goes on from here
    equal to the last bit, or the run stops

The graph's turn leaves no mark: values and random numbers are put back, nothing is logged. The
user's code runs once, as it would without us.

Kernels of a GPU may have other last bits from run to run (sums by atomics). So the graph has two
turns there: what both make alike must be plain Lightning's to the last bit, and what they do not
may be off by `APART` times what the two are apart. Where the plan updates on the host, what a step
changes may be off by `APART` units in the last place. Copies are kept on the host.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer

from offload import OffloadError, Plan
from offload.sizes import say_size
from trainers.generators import States, drawn, put_back, same

Tensors = Mapping[str, torch.Tensor]
HOST = torch.device("cpu")
APART = 8.0
"""Norms: of ours less plain Lightning's, to one of our turns less the other. Two runs with the same
noise are no further apart than two others, but for chance."""
LOSS = "the loss"
OPTIMIZER = "optimizer."
"""What the names of its state begin with."""


class DifferenceFound(OffloadError):
    """A step of the plan is not what plain Lightning does."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What a step begins with, to go back to."""

    values: Tensors
    random: States
    device: torch.device

    @classmethod
    def of(cls, tensors: Tensors, device: torch.device = HOST) -> "Start":
        return cls(_copied(tensors), drawn(device), device)

    def restore(self, tensors: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self.values[name])
        put_back(self.random, self.device)


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What the graph made of a step."""

    values: Tensors
    random: States
    loss: torch.Tensor
    device: torch.device = HOST
    apart: Mapping[str, float] = field(default_factory=dict)
    """By how much two turns of the graph differ, where they do: the norm of the difference."""

    @classmethod
    def of(cls, tensors: Tensors, loss: torch.Tensor, device: torch.device = HOST) -> "Expected":
        return cls(_copied(tensors), drawn(device), loss.to(HOST, copy=True), device)

    def compare_loss(self, eager: Any) -> None:
        loss = eager["loss"] if isinstance(eager, Mapping) else eager
        _compare({LOSS: self.loss}, {LOSS: loss.detach()}, self.apart)

    def compare_random(self) -> None:
        """At the micro-batch's end: hooks may draw, too."""
        if not same(self.random, drawn(self.device)):
            raise DifferenceFound(
                "the planned step draws other random numbers than the eager one: it was captured in"
                " another situation than this one. Give budget=None, and report the module"
            )

    def compare_state(self, tensors: Tensors) -> None:
        _compare(self.values, tensors, self.apart)

    def rounded(self, names: Container[str]) -> "Expected":
        """These are updated on the host, and on a GPU by plain Lightning: it rounds otherwise."""
        apart = {name: _rounding(value) for name, value in self.values.items() if name in names}
        return replace(self, apart=apart)

    def unlike(self, other: "Expected") -> Mapping[str, float]:
        """The same start, another turn of the graph."""
        mine, theirs = {**self.values, LOSS: self.loss}, {**other.values, LOSS: other.loss}
        return {name: far for name in mine if (far := _distance(mine[name], theirs[name])) != 0}


def compare_gradients(
    names: Mapping[torch.nn.Parameter, str],
    sums: Mapping[torch.nn.Parameter, torch.Tensor],
    held: frozenset[torch.nn.Parameter],
    apart: Mapping[str, float],
) -> None:
    """Those of the micro-batches so far."""
    for p in held:
        name = gradient_of(names, p)
        eager = torch.zeros(()) if p.grad is None else p.grad
        _compare({name: sums[p]}, {name: eager}, apart)


def gradient_of(names: Mapping[torch.nn.Parameter, str], p: torch.nn.Parameter) -> str:
    return f"the gradient of {names.get(p, 'a parameter')}"


def state_of(module: L.LightningModule, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """All that a step changes, by name; the tensors themselves."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    found.update(module.named_buffers())
    names: dict[Any, str] = {p: name for name, p in module.named_parameters()}
    for number, (p, state) in enumerate(optimizer.state.items()):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{OPTIMIZER}{key}.{names.get(p, number)}"] = value
    return {name: tensor.detach() for name, tensor in found.items()}


def no_room(plan: Plan, left: int) -> str:
    """Why plain Lightning's step cannot be made beside this plan's arena; empty: it can, as far as
    one sees. `left`: bytes of the device that are free."""
    if plan.peak_bytes <= left:
        return ""
    return (
        f"plain Lightning's step takes {say_size(plan.peak_bytes)} beside the plan's"
        f" {say_size(plan.device_bytes)}, and {say_size(left)} are free there"
    )


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.to(HOST, copy=True) for name, tensor in tensors.items()}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """0: not a bit is different, NaN for NaN."""
    if bool(_alike(one, other).all()):
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    far = float((one.to(wide) - other.to(wide)).norm())
    return far if far else float(torch.finfo(torch.float64).tiny)  # NaN is far from nothing


def _rounding(value: torch.Tensor) -> float:
    """Of one unit in the last place everywhere, the norm."""
    if not value.is_floating_point() and not value.is_complex():
        return 0.0
    return torch.finfo(value.dtype).eps * float(value.abs().double().norm())


def _alike(ours: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    same = ours == other
    if other.is_floating_point() or other.is_complex():
        same |= ours.isnan() & other.isnan()
    return same


def _compare(planned: Tensors, eager: Tensors, apart: Mapping[str, float]) -> None:
    for name, other in eager.items():
        ours = planned.get(name)
        if ours is None or ours.shape != other.shape or ours.dtype != other.dtype:
            raise DifferenceFound(f"{name} is there after the eager step, and not after ours")
        ours, other = ours.detach().to(HOST), other.detach().to(HOST)
        alike = _alike(ours, other)
        if bool(alike.all()):
            continue
        allowed, far = APART * apart.get(name, 0.0), _distance(ours, other)
        if far <= allowed:
            continue
        at = int((~alike).flatten().nonzero()[0])
        more = f" They are {far:.3g} apart, {allowed:.3g} would pass." if allowed else ""
        raise DifferenceFound(
            f"{name} differs after a planned and an eager step: element {at} of {other.numel()}"
            f" is {ours.flatten()[at].item()!r} and {other.flatten()[at].item()!r}"
            f" ({int((~alike).sum())} differ).{more}"
            " Something that the step depends on is not captured, or a kernel is not"
            " deterministic. check_first_steps=0 trains without this check"
        )
