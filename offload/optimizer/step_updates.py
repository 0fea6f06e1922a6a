"""The update of one parameter by the optimizer's own `step()`, whatever optimizer it is.

    (p, g, exp_avg, ..) --> a copy of the optimizer with one parameter, p.grad = g, and its state
                            copy.step()                    the step's own Python, at every step
    counters            --> copies; the optimizer's own advance once, when the step is over

Nothing of it is traced: learning rates, counters and every branch that depends on them are as the
step finds them now. step_study.py has checked before that the step treats each parameter alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from offload.errors import GraphError
from offload.optimizer.step_copies import copy_with, own_step
from offload.program.kernels import CPU
from offload.torch_seams import mark_stepped

Counters = tuple[tuple[str, Any], ...]


@dataclass(slots=True, eq=False)
class LateState:
    """A state that the first step itself makes, of its gradient or with the learning rate that it
    finds. Until then placeholders have its places."""

    optimizer: Optimizer
    parameter: torch.nn.Parameter
    placeholders: Mapping[str, Any]
    made: bool = False

    @property
    def missing(self) -> frozenset[str]:
        """The keys that the next step makes. Who loads a state replaces its tensors."""
        now, own = self.optimizer.state[self.parameter], self.placeholders.items()
        if self.made or any(now.get(k) is not t for k, t in own if isinstance(t, torch.Tensor)):
            return frozenset()
        return frozenset(self.placeholders)


@dataclass(frozen=True, slots=True, eq=False)
class StepUpdate:
    """`update(p, g, *states)` changes all but `g` in place."""

    optimizer: Optimizer
    group: int
    """Number of the optimizer's parameter group."""
    parameter: torch.nn.Parameter
    states: tuple[str, ...]
    """Keys of `optimizer.state[parameter]` whose tensors it is given."""
    device: torch.device = CPU
    """Where the step runs. The parameter may live elsewhere."""
    elementwise: bool = False
    changes_gradient: bool = False
    """Whether the step works in place on the gradient. Then it gets a copy."""
    variants: tuple[Counters, ...] = ()
    """Values of counters for which the step calls other kernels, which may allocate more."""
    late: LateState | None = None
    counting: Counters | None = None
    """Values for the counters instead of the optimizer's, to measure a variant."""
    advanced: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the counters of `optimizer.state[parameter]` will be when this step is over."""

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for two updates that do the same to tensors of the same shape."""
        return (
            StepUpdate, id(self.optimizer), self.group, self.states, self.variants,
            self.changes_gradient, self.late is not None,
        )  # fmt: skip

    def __call__(self, p: torch.Tensor, g: torch.Tensor, *states: torch.Tensor) -> None:
        planned = dict(zip(self.states, states, strict=True))
        missing = self.late.missing if self.late is not None else frozenset[str]()
        held = self._held(planned, missing)
        own = torch.nn.Parameter(p)
        own.grad = g.clone() if self.changes_gradient else g
        groups = self.optimizer.param_groups
        one = copy_with(self.optimizer, groups, {self.group: (own,)}, {own: held})
        with torch.no_grad():
            own_step(self.optimizer)(one)
            self._check(one.state[own], planned)
            self._settle(one.state[own], planned)

    def _held(self, planned: Mapping[str, torch.Tensor], missing: frozenset[str]) -> dict[str, Any]:
        """The state of the copy: planned tensors, and counters that it may advance."""
        counting = dict(self.counting or ())
        held: dict[str, Any] = {}
        for key, value in self.optimizer.state[self.parameter].items():
            if key in missing:
                continue
            if key in planned:
                held[key] = planned[key]
            elif isinstance(value, torch.Tensor):
                held[key] = value.detach().clone()
                if key in counting:
                    held[key].fill_(counting[key])
            else:
                held[key] = counting.get(key, value)
        return held

    def _check(self, after: Mapping[str, Any], planned: Mapping[str, torch.Tensor]) -> None:
        for key in (*self.states, *after):
            old = planned.get(key, self.optimizer.state[self.parameter].get(key, self))
            new = after.get(key, self)
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                if (new.size(), new.dtype) == (old.size(), old.dtype):
                    continue
            elif old is not self and new is not self:
                tensors = isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor)
                if not tensors:
                    continue
            raise GraphError(
                f"optimizer {type(self.optimizer).__name__}: its step made {_said(new, self)} of"
                f" state {key!r}, which is {_said(old, self)} in the plan. A planned state keeps"
                " its size and type; capture the step again"
            )

    def _settle(self, after: Mapping[str, Any], planned: Mapping[str, torch.Tensor]) -> None:
        """Copy what the step put elsewhere, and note the counters as plain numbers: their tensors
        may lie in memory that is only lent to this call."""
        for key, value in after.items():
            if key in planned:
                if value is not planned[key]:
                    planned[key].copy_(value)
            else:
                self.advanced[key] = value.item() if isinstance(value, torch.Tensor) else value


def _said(value: Any, missing: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.size())}"
    return "nothing" if value is missing else type(value).__name__


def advance_steps(updates: Sequence[StepUpdate]) -> Callable[[], None]:
    """A function that advances the optimizer's counters after each step."""

    def after_step() -> None:
        for update in updates:
            state = update.optimizer.state[update.parameter]
            for key, value in update.advanced.items():
                if isinstance(state.get(key), torch.Tensor):
                    state[key].fill_(value)
                else:
                    state[key] = value
            if update.late is not None:
                update.late.made = True
        if updates:
            mark_stepped(updates[0].optimizer)  # for learning rate schedulers

    return after_step
