"""The update of one parameter by the optimizer's own `step()`, whatever optimizer it is.

    (p, g, exp_avg, ..) --> a copy of the optimizer with one parameter, p.grad = g, and its state
                            copy.step()                    the step's own Python, at every step
    counters            --> copies; the optimizer's own advance once, when the step is over

Nothing of it is traced: learning rates, counters and every branch that depends on them are as the
step finds them now. step_study.py has checked before that the step treats each parameter alone.

A state begins in the first step, as in eager: the copy has none, and makes it. What it makes is
copied to the planned places, and the optimizer has it when the step is over.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from offload.errors import GraphError
from offload.optimizer.step_copies import copy_with, own_step
from offload.optimizer.step_guards import StepGuard
from offload.program.kernels import CPU
from offload.torch_seams import mark_stepped

Counters = tuple[tuple[str, Any], ...]
"""Entries of a state that are no planned tensors, with their numbers."""


@dataclass(frozen=True, slots=True)
class Number:
    """A tensor of one element, without memory: what the step made may lie in memory that is only
    lent to it."""

    value: Any
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Number":
        return cls(tensor.item(), tuple(tensor.size()), tensor.dtype, tensor.device)

    def tensor(self) -> torch.Tensor:
        return torch.full(self.size, self.value, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class StepUpdate:
    """`update(p, g, *states)` changes all but `g` in place."""

    optimizer: Optimizer
    group: int
    """Number of the optimizer's parameter group."""
    parameter: torch.nn.Parameter
    entries: tuple[str, ...]
    """Keys of `optimizer.state[parameter]` after a step, in their order."""
    tensors: Mapping[str, torch.Tensor]
    """The planned entries, as long as the optimizer has none."""
    device: torch.device = CPU
    """Where the step runs. The parameter may live elsewhere."""
    elementwise: bool = False
    changes_gradient: bool = False
    """Whether the step works in place on the gradient. Then it gets a copy."""
    variants: tuple[Counters, ...] = ()
    """Counters with which the step calls other kernels, which may allocate more."""
    known: frozenset[str] | None = None
    """The names of all ops that its step was seen to call; None: the step is torch's own."""
    counting: Counters | None = None
    """Counters to measure with, as if a step had been made already."""
    advanced: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the counters of `optimizer.state[parameter]` will be when this step is over."""

    @property
    def states(self) -> tuple[str, ...]:
        """Keys of the tensors that it is called with."""
        return tuple(self.tensors)

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for two updates that do the same to tensors of the same shape."""
        return (
            StepUpdate, id(self.optimizer), self.group, self.entries, self.states, self.variants,
            self.changes_gradient, tuple(self._state()),
        )  # fmt: skip

    def live(self, key: str) -> torch.Tensor:
        """A planned entry: the optimizer's tensor, or the one that it will have."""
        found = self._state().get(key)
        return self.tensors[key] if found is None else found

    def _state(self) -> dict[str, Any]:
        return self.optimizer.state.get(self.parameter) or {}

    def __call__(self, p: torch.Tensor, g: torch.Tensor, *states: torch.Tensor) -> None:
        planned = dict(zip(self.tensors, states, strict=True))
        with torch.no_grad():
            own = torch.nn.Parameter(p)
            own.grad = g.clone() if self.changes_gradient else g
            held = self._held(planned)
            groups = self.optimizer.param_groups
            one = copy_with(
                self.optimizer, groups, {self.group: (own,)}, {own: held} if held else {}
            )
            with self._guard(p):
                own_step(self.optimizer)(one)
            after = one.state.get(own, {})
            self._check(after, planned)
            for key, value in after.items():
                if key not in planned:
                    self.advanced[key] = Number.of(value) if _is_tensor(value) else value
                elif value is not planned[key]:
                    planned[key].copy_(value)

    def _guard(self, p: torch.Tensor) -> AbstractContextManager[Any]:
        if self.known is None:
            return nullcontext()
        name = type(self.optimizer).__name__
        return StepGuard(name, self.known, p.size() if self.elementwise else None)

    def _held(self, planned: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The state of the copy: planned tensors, and counters that it may advance."""
        if self.counting is not None:
            counting = dict(self.counting)
            return {
                key: planned[key] if key in planned else _own(counting[key]) for key in self.entries
            }
        return {
            key: planned[key] if key in planned and value is not None else _own(value)
            for key, value in self._state().items()
        }

    def _check(self, after: Mapping[str, Any], planned: Mapping[str, torch.Tensor]) -> None:
        for key in dict.fromkeys((*self.entries, *after)):
            value, place = after.get(key, self), planned.get(key)
            if place is None:
                if key in self.entries and value is not self and _is_number(value):
                    continue
            elif _is_tensor(value) and (value.size(), value.dtype) == (place.size(), place.dtype):
                continue
            was = "a number" if place is None else f"{place.dtype} {tuple(place.size())}"
            raise GraphError(
                f"optimizer {type(self.optimizer).__name__}: its state {key!r} is"
                f" {'gone' if value is self else _said(value)}, and the plan has"
                f" {was if key in self.entries else 'none'}. A planned state keeps its size and"
                " type: capture the step again"
            )

    def settle(self) -> None:
        """Let the optimizer have what the step that is over has made."""
        state = self.optimizer.state[self.parameter]
        for key in self.entries:
            if key in self.tensors:
                if state.get(key) is None:
                    state[key] = self.tensors[key]
            elif isinstance(number := self.advanced[key], Number):
                if _is_tensor(state.get(key)):
                    state[key].fill_(number.value)
                else:
                    state[key] = number.tensor()
            else:
                state[key] = number


def _own(value: Any) -> Any:
    if isinstance(value, Number):
        return value.tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else True


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.size())}"
    return type(value).__name__


def settled(updates: Sequence[StepUpdate]) -> Callable[[], None]:
    """A function that does what `optimizer.step()` does once a step on the host."""

    def after_step() -> None:
        with torch.no_grad():
            for update in updates:
                update.settle()
        if updates:
            mark_stepped(updates[0].optimizer)  # for learning rate schedulers

    return after_step
