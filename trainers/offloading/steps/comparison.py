"""Compares a step of the graph with the same step of plain Lightning, from the same start.

    start --graph--> end, loss   copied              start --training_step, backward, step--> end
                                                              the run goes on from here
    the two ends are equal to the last bit, or the run stops

The graph's run leaves no trace: values and random states are restored, and nothing is logged. The
user's code runs once, as in a run without us.

The last bits of GPU kernels may differ from run to run (sums by atomics). So the graph runs twice
there. A tensor in which both runs agree must equal plain Lightning's to the last bit; any other
tensor may differ by `APART` times as much as the two runs do. If the plan updates on the host, what
a step changes may differ by `APART` units in the last place. Copies are kept on the host.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer

from offload import OffloadError, Plan
from offload.sizes import say_size
from trainers.offloading.hardware.generators import States, drawn, put_back, same
from trainers.offloading.tracing.closure import loss_in

Tensors = Mapping[str, torch.Tensor]
HOST = torch.device("cpu")
APART = 8.0
"""The norm of (graph - plain Lightning) may be this many times the norm of (graph's run 1 - run 2).
All these runs have the same noise, so only chance makes one pair differ more than another."""
LOSS = "the loss"
OPTIMIZER = "optimizer."
"""The names of the optimizer's state begin with this."""


class DifferenceFound(OffloadError):
    """A planned step has another result than plain Lightning's."""

    def __init__(self, said: str, name: str = "") -> None:
        """`name`: of the tensor that differs."""
        super().__init__(said)
        self.name = name


@dataclass(frozen=True, slots=True, eq=False)
class StepStart:
    """The values and random states at the start of a step, to be restored."""

    values: Tensors
    random: States
    device: torch.device
    own: Sequence[torch.Generator] = ()
    """The generators that the step's ops are given."""

    @classmethod
    def of(
        cls,
        tensors: Tensors,
        device: torch.device = HOST,
        own: Sequence[torch.Generator] = (),
    ) -> "StepStart":
        return cls(_copied(tensors), drawn(device, own), device, own)

    def restore(self, tensors: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self.values[name])
        put_back(self.random, self.device, self.own)


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedStep:
    """The results of the graph's run of a step."""

    values: Tensors
    random: States
    loss: torch.Tensor
    device: torch.device = HOST
    apart: Mapping[str, float] = field(default_factory=dict)
    """For tensors in which two runs of the graph differ: the norm of the difference."""
    own: Sequence[torch.Generator] = ()
    """The generators that the step's ops are given."""

    @classmethod
    def of(
        cls,
        tensors: Tensors,
        loss: torch.Tensor,
        device: torch.device = HOST,
        own: Sequence[torch.Generator] = (),
    ) -> "ExpectedStep":
        loss = loss.to(HOST, copy=True)
        return cls(_copied(tensors), drawn(device, own), loss, device, own=own)

    def compare_loss(self, eager: Any) -> None:
        _compare({LOSS: self.loss}, {LOSS: loss_in(eager).detach()}, self.apart)

    def compare_left(
        self, names: Mapping[torch.nn.Parameter, str], holds: frozenset[torch.nn.Parameter]
    ) -> None:
        """Compare the gradients that a step by hand has left in `.grad`. `holds`: the parameters
        for which the planned step has left one."""
        for p in names:
            name = gradient_of(names, p)
            if (p.grad is None) == (p in holds):
                raise DifferenceFound(
                    f"{name} is there after the {'planned' if p.grad is None else 'eager'} step"
                    " alone. Train without offloading (budget=None, check_first_steps=0), and"
                    " report the module",
                    name,
                )
            if p.grad is not None:
                _compare({name: self.values[name]}, {name: p.grad}, self.apart)

    def compare_random(self) -> None:
        """Compare the random states at the end of a micro-batch, because hooks may draw, too."""
        if not same(self.random, drawn(self.device, self.own)):
            raise DifferenceFound(
                "the planned step draws other random numbers than the eager one, so it was captured"
                " in another situation than this one. Train without offloading (budget=None,"
                " check_first_steps=0), and report the module"
            )

    def compare_state(self, tensors: Tensors) -> None:
        _compare(self.values, tensors, self.apart)

    def rounded(self, names: Container[str]) -> "ExpectedStep":
        """Allow rounding differences in these tensors: the plan updates them on the host, and plain
        Lightning on the GPU."""
        apart = {name: _rounding(value) for name, value in self.values.items() if name in names}
        return replace(self, apart=apart)

    def unlike(self, other: "ExpectedStep") -> Mapping[str, float]:
        """Return the tensors that differ in another run of the graph, and by how much."""
        mine, theirs = {**self.values, LOSS: self.loss}, {**other.values, LOSS: other.loss}
        return {name: far for name in mine if (far := _distance(mine[name], theirs[name])) != 0}


def compare_gradients(
    names: Mapping[torch.nn.Parameter, str],
    sums: Mapping[torch.nn.Parameter, torch.Tensor],
    held: frozenset[torch.nn.Parameter],
    apart: Mapping[str, float],
) -> None:
    """Compare the sums of the micro-batches so far with `.grad`."""
    for p in held:
        name = gradient_of(names, p)
        eager = torch.zeros(()) if p.grad is None else p.grad
        _compare({name: sums[p]}, {name: eager}, apart)


def gradient_of(names: Mapping[torch.nn.Parameter, str], p: torch.nn.Parameter) -> str:
    return f"the gradient of {names.get(p, 'a parameter')}"


def state_of(module: L.LightningModule, optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """Return, by name, the tensors that a step changes, not copies of them."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    found.update(module.named_buffers())
    names: dict[Any, str] = {p: name for name, p in module.named_parameters()}
    for own, optimizer in enumerate(optimizers):
        which = f"{own}." if len(optimizers) > 1 else ""
        for number, (p, state) in enumerate(optimizer.state.items()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"{OPTIMIZER}{which}{key}.{names.get(p, number)}"] = value
    return {name: tensor.detach() for name, tensor in found.items()}


def no_room(plan: Plan, left: int) -> str:
    """Say why plain Lightning's step has no room beside this plan's arena; empty if it should fit.
    `left` is the number of free bytes of the device."""
    if plan.peak_bytes <= left:
        return ""
    return (
        f"plain Lightning's step takes {say_size(plan.peak_bytes)} beside the plan's"
        f" {say_size(plan.device_bytes)}, and {say_size(left)} are free there"
    )


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.to(HOST, copy=True) for name, tensor in tensors.items()}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference; 0 means that all bits are equal, and NaN equals NaN."""
    if bool(_alike(one, other).all()):
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    far = float((one.to(wide) - other.to(wide)).norm())
    return far if far else float(torch.finfo(torch.float64).tiny)  # not equal, so never 0


def _rounding(value: torch.Tensor) -> float:
    """Return the norm of an error of one unit in the last place in every element."""
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
            raise DifferenceFound(
                f"{name} exists after the eager step, but not after the planned one in this shape"
                " and type. Train without offloading (budget=None, check_first_steps=0), and report"
                " the module",
                name,
            )
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
            " deterministic. check_first_steps=0 trains without this check",
            name,
        )
