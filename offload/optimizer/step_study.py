"""Finds out what an optimizer's `step()` does to each parameter, before it is planned.

    the next step             which state it has, or makes                  -> what is planned
    the step after that one   the same ops?                                 -> is it elementwise?
    with counters far ahead   which other ops there are                     -> variants, to measure
    all parameters at once    each has the ops that it has alone            -> one task a parameter

What does not hold for every parameter and every later step is refused by name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from offload.errors import CaptureError
from offload.optimizer.step_copies import is_torchs
from offload.optimizer.step_guards import plain_name
from offload.optimizer.step_traces import Outcome, Part, State, trace_step
from offload.optimizer.step_updates import Counters, Number, StepUpdate
from offload.torch_seams import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

NEAR, FAR = tuple(range(2, 13)), (10**2, 10**4, 10**6, 10**9)
"""Numbers of steps at which the ops of a step are looked at."""
ADVICE = "Use another optimizer, or capture(step) and update outside of it"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a step does to the parameters of one kind."""

    first: Outcome
    """Of the next step."""
    second: Outcome
    """Of the step after that one, which finds all of the state."""

    @property
    def begins(self) -> bool:
        """Whether the next step makes some of the state."""
        return self.first.calls != self.second.calls or bool(self.first.made)

    @property
    def planned(self) -> dict[str, torch.Tensor]:
        """The entries of the state that are planned, as fakes; all others are counters."""
        state = self.second.state
        return {key: value for key, value in state.items() if isinstance(value, FakeTensor)}


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What a step does sooner or later."""

    outcomes: tuple[Outcome, ...]
    variants: tuple[Counters, ...]
    """Counters with which it calls other kernels than next time."""


class StepStudy:
    """What the `step()` of one optimizer does."""

    def __init__(self, optimizer: Optimizer, device: torch.device | None = None) -> None:
        """`device`: where the step will run; None: where each parameter is."""
        self._optimizer = optimizer
        self._device = device
        self._checked = False
        self._facts: dict[tuple[Any, ...], StepFacts] = {}
        self._ahead: dict[tuple[Any, ...], _Ahead] = {}

    def check(self) -> None:
        """Raise `CaptureError` if the step cannot be planned one parameter at a time."""
        if self._checked:
            return
        kinds: dict[tuple[Any, ...], list[tuple[int, torch.Tensor]]] = {}
        with _named(self._optimizer):
            for number, group in enumerate(self._optimizer.param_groups):
                for p in group["params"]:
                    if not p.requires_grad:
                        continue
                    if type(p) not in (torch.Tensor, torch.nn.Parameter):
                        raise CaptureError(f"a parameter is a {type(p).__name__}")
                    kinds.setdefault(self._kind(number, p), []).append((number, p))
            some = [one for alike in kinds.values() for one in alike[:2]]
            if len(some) == 1:
                self._of(*some[0])
            elif some:
                self._check_apart(some)
        self._checked = True

    def update_of(self, group: int, p: torch.nn.Parameter) -> StepUpdate:
        """The update of a parameter. The optimizer's state stays as it is."""
        with _named(self._optimizer):
            facts = self._of(group, p)
            ahead = self._ahead_of(group, p, facts)
        known = frozenset(plain_name(op.func) for one in ahead.outcomes for op in one.ops)
        return StepUpdate(
            self._optimizer,
            group,
            p,
            tuple(facts.second.state),
            {key: _place_like(fake, p) for key, fake in facts.planned.items()},
            self._where(p),
            all(one.elementwise for one in ahead.outcomes),
            any(one.changes_gradient for one in ahead.outcomes),
            ahead.variants,
            None if is_torchs(self._optimizer) else known,
        )

    def _where(self, p: torch.Tensor) -> torch.device:
        return self._device or p.device

    def _kind(self, group: int, p: torch.Tensor) -> tuple[Any, ...]:
        held = [
            (key, v.size(), v.stride(), v.dtype, *([v.item()] if v.numel() == 1 else []))
            if isinstance(v, torch.Tensor)
            else (key, type(v), v)
            for key, v in self._optimizer.state.get(p, {}).items()
        ]
        return group, p.size(), p.stride(), p.dtype, self._where(p), repr(held)

    def _trace(self, group: int, p: torch.Tensor, state: State) -> Outcome:
        [outcome] = trace_step(self._optimizer, [Part(group, p, state)], self._where(p))
        return outcome

    def _of(self, group: int, p: torch.Tensor) -> StepFacts:
        kind = self._kind(group, p)
        if kind not in self._facts:
            given = self._optimizer.state.get(p, {})
            first = self._trace(group, p, given)
            second = self._trace(group, p, first.state)
            for before, after in ((given, first.state), (first.state, second.state)):
                if gone := [key for key in before if key not in after]:
                    raise CaptureError(f"it removes its state {gone[0]!r}")
            if new := [key for key in second.state if key not in first.state]:
                raise CaptureError(f"it makes its state {new[0]!r} in the second step")
            self._facts[kind] = StepFacts(first, second)
        return self._facts[kind]

    def _ahead_of(self, group: int, p: torch.Tensor, facts: StepFacts) -> _Ahead:
        first, second = facts.first, facts.second
        # What is done to an element does not depend on how many there are, but its layout counts.
        key = group, first.calls, second.calls, facts.begins, second.elementwise
        if key not in self._ahead:
            seen = {} if facts.begins else {first.calls: (first, _counters({}))}
            for before, outcome in ((first.state, second), *self._later(group, p, facts)):
                seen.setdefault(outcome.calls, (outcome, _counters(before)))
            self._ahead[key] = _Ahead(
                (first, *(outcome for outcome, _ in seen.values())),
                tuple(tuple(found.items()) for _, found in seen.values() if found),
            )
        return self._ahead[key]

    def _later(
        self, group: int, p: torch.Tensor, facts: StepFacts
    ) -> Iterator[tuple[State, Outcome]]:
        """Steps with counters far ahead, each with the state before it."""
        counting = _counting(facts.first.counters(), facts.second.counters())
        for number in (*NEAR, *FAR) if counting else ():
            now = {k: _set(v, number) if k in counting else v for k, v in facts.first.state.items()}
            for _ in range(2 if number in FAR else 1):  # some counters follow another one
                outcome = self._trace(group, p, now)
                yield now, outcome
                now = dict(outcome.state)

    def _check_apart(self, some: list[tuple[int, torch.Tensor]]) -> None:
        """Raise if a parameter is treated otherwise among others than it is alone."""
        devices = {self._where(p) for _, p in some}
        if len(devices) > 1:
            raise CaptureError(f"its parameters are on {len(devices)} devices")
        parts = [Part(n, p, self._optimizer.state.get(p, {})) for n, p in some]
        alone = [self._of(*one).first for one in some]
        together = trace_step(self._optimizer, parts, devices.pop())
        if any(a.lines != b.lines for a, b in zip(alone, together, strict=True)) or any(
            a.counters() != b.counters() for a, b in zip(alone, together, strict=True)
        ):
            raise CaptureError(
                "it treats a parameter otherwise where there are others, and a plan updates one"
                " parameter at a time"
            )


def _place_like(fake: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    place = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=p.device)
    return place.zero_()


def _counters(state: State) -> dict[str, Any]:
    """The entries of a state that are no planned tensors, with numbers in place of tensors."""
    return {
        key: Number.of(value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if not isinstance(value, FakeTensor)
    }


def _counting(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The counters that a step advances by 1."""
    numbers = {key: value for key, value in before.items() if isinstance(value, int | float)}
    return [key for key, value in numbers.items() if after.get(key) == value + 1]


def _set(value: Any, number: int) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, number)
    return type(value)(number)


def measured_variants(update: StepUpdate) -> list[StepUpdate]:
    """Updates that call all the kernels that this one may call."""
    return [update, *(replace(update, counting=counters) for counters in update.variants)]


@contextmanager
def _named(optimizer: Optimizer) -> Iterator[None]:
    """Name the optimizer in what is raised."""
    name = type(optimizer).__name__
    try:
        yield
    except CaptureError as error:
        raise CaptureError(f"optimizer {name} cannot be planned: {error}. {ADVICE}") from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"optimizer {name} cannot be planned: it asks for values that are only known while it"
            f" runs ({str(error).splitlines()[0]}). {ADVICE}"
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CaptureError(
            f"optimizer {name} cannot be planned: its step() fails on tensors without values"
            f" ({what}). {ADVICE}"
        ) from error
