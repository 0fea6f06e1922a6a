"""Finds out what an optimizer's `step()` does to each parameter, before it is planned.

    from an empty state       makes exp_avg = zeros_like(p), step = 0, ..   -> how a state begins
    from that state           the same ops, else the step is refused        -> is it elementwise?
    with counters far ahead   which other ops there are                     -> variants, to measure
    all parameters at once    each has the ops that it has alone            -> one task a parameter

Whatever a step does that does not hold for every later step is refused by name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from offload.errors import CaptureError
from offload.optimizer.step_spy import FILLS, StepSpy, ValueAsked
from offload.optimizer.step_traces import Outcome, Part, State, trace_step
from offload.optimizer.step_updates import Counters, LateState, StepUpdate
from offload.program.kernels import CPU
from offload.program.trees import mapped, tensors_of
from offload.torch_seams import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    name_of,
    storage_key,
)

Make = Callable[[torch.Tensor], Any]
NEAR, FAR = tuple(range(2, 13)), tuple(10**power for power in range(2, 10))
"""Numbers of steps at which the ops of a step are looked at."""
NEARLY = 1 - 2**-10
"""All settings times this are others, and no number turns into 0."""
ADVICE = "Use another optimizer, or capture(step) and update outside of it"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a step does to the parameters of one kind."""

    begin: Mapping[str, Make]
    """How each entry of a state that is not there yet begins."""
    late: bool
    """Whether the first step itself must make them: of its gradient, or with the learning rate that
    it finds."""
    states: tuple[str, ...]
    """Keys of states that are planned; all others are counters."""
    steady: State
    """A state as the second step finds it, for tracing."""
    outcome: Outcome
    """What the second step does, or the first one if they are alike."""
    elementwise: bool
    changes_gradient: bool


@dataclass(frozen=True, slots=True)
class _Alone:
    """A step over one parameter."""

    outcome: Outcome
    spy: StepSpy


class StepStudy:
    """What the `step()` of one optimizer does."""

    def __init__(self, optimizer: Optimizer, device: torch.device | None = None) -> None:
        """`device`: where the step will run; None: where each parameter is."""
        self._optimizer = optimizer
        self._device = device
        self._facts: dict[tuple[Any, ...], StepFacts] = {}
        self._variants: dict[tuple[Any, ...], tuple[Counters, ...]] = {}

    def check(self) -> None:
        """Raise `CaptureError` if the step cannot be planned one parameter at a time."""
        kinds: dict[tuple[Any, ...], list[Part]] = {}
        with _named(self._optimizer):
            for number, group in enumerate(self._optimizer.param_groups):
                for p in group["params"]:
                    if not p.requires_grad:
                        continue
                    if type(p) not in (torch.Tensor, torch.nn.Parameter):
                        raise CaptureError(f"a parameter is a {type(p).__name__}")
                    alike = kinds.setdefault(self._kind(number, p), [])
                    if len(alike) < 2:
                        alike.append(Part(number, p, self._of(number, p).steady))
            parts = [part for alike in kinds.values() for part in alike]
            if len(parts) > 1:
                self._check_apart(parts)

    def update_of(self, group: int, p: torch.nn.Parameter) -> StepUpdate:
        """The update of a parameter. It also makes the state that the first step would make."""
        with _named(self._optimizer):
            facts = self._of(group, p)
            variants = self._variants_of(group, p, facts)
        state = self._optimizer.state[p]
        with torch.no_grad():
            made = {k: make(p) for k, make in facts.begin.items() if state.get(k) is None}
        state.update(made)
        late = made if facts.late else None
        return StepUpdate(
            self._optimizer,
            group,
            p,
            facts.states,
            self._where(p),
            facts.elementwise,
            facts.changes_gradient,
            variants,
            LateState(self._optimizer, p, late) if late else None,
        )

    def _where(self, p: torch.Tensor) -> torch.device:
        return self._device or p.device

    def _kind(self, group: int, p: torch.Tensor) -> tuple[Any, ...]:
        state = self._optimizer.state.get(p, {})
        held = [
            (key, v.size(), v.stride(), v.dtype) if isinstance(v, torch.Tensor) else (key, type(v))
            for key, v in state.items()
        ]
        return group, p.size(), p.stride(), p.dtype, self._where(p), *held

    def _trace(self, group: int, p: torch.Tensor, state: State, scale: float = 1.0) -> _Alone:
        trace = trace_step(self._optimizer, [Part(group, p, state)], self._where(p), scale)
        return _Alone(trace.outcomes[0], trace.spy)

    def _of(self, group: int, p: torch.Tensor) -> StepFacts:
        kind = self._kind(group, p)
        if kind not in self._facts:
            self._facts[kind] = self._studied(group, p)
        return self._facts[kind]

    def _studied(self, group: int, p: torch.Tensor) -> StepFacts:
        given = dict(self._optimizer.state.get(p, {}))
        first = self._trace(group, p, given)
        if gone := [key for key in given if key not in first.outcome.state]:
            raise CaptureError(f"it removes its state {gone[0]!r}")
        new = [k for k, v in first.outcome.state.items() if v is not None and given.get(k) is None]
        begun = {key: _begun(first.outcome.state[key], first) for key in new}
        late = None in begun.values() or self._depends(group, p, given, new, first)
        begin = {k: make or _placeholder(first.outcome.state[k]) for k, make in begun.items()}
        state = {**dict.fromkeys(first.outcome.state), **given}
        state |= {key: _first_value(first.outcome.state[key], begun[key]) for key in new}
        found = [first.outcome]
        if new:
            found.append(self._trace(group, p, state).outcome)
            if not late:
                _check_second(*found, new)
        steady = found[-1]
        return StepFacts(
            begin,
            late,
            tuple(k for k, v in steady.state.items() if isinstance(v, FakeTensor)),
            state,
            steady,
            all(one.elementwise for one in found),
            any(one.changes_gradient for one in found),
        )

    def _depends(
        self, group: int, p: torch.Tensor, given: State, new: Sequence[str], first: _Alone
    ) -> bool:
        """Whether the state begins with settings, which may change before the first step."""
        other = self._trace(group, p, given, scale=NEARLY)
        return [_beginning(first, key) for key in new] != [_beginning(other, key) for key in new]

    def _variants_of(self, group: int, p: torch.Tensor, facts: StepFacts) -> tuple[Counters, ...]:
        """Counters for which the step calls other kernels than with the present ones."""
        state, steady, late = facts.steady, facts.outcome, facts.late
        key = group, steady.calls, late, facts.states
        if key not in self._variants:
            seen = {steady.calls: _counters(state)}
            counting = _counting(_counters(state), steady.counters())
            if counting:
                self._look_ahead(group, p, state, counting, seen)
            many = len(seen) > 1 or late
            self._variants[key] = tuple(map(_frozen, seen.values())) if many else ()
        return self._variants[key]

    def _look_ahead(
        self,
        group: int,
        p: torch.Tensor,
        state: State,
        counting: list[str],
        seen: dict[tuple[str, ...], dict[str, Any]],
    ) -> None:
        for number in (*NEAR, *FAR):
            now = {k: _set(v, number) if k in counting else v for k, v in state.items()}
            for _ in range(2 if number in FAR else 1):  # some counters follow another one
                before = _counters(now)
                outcome = self._trace(group, p, now).outcome
                seen.setdefault(outcome.calls, before)
                now = dict(outcome.state)

    def _check_apart(self, parts: list[Part]) -> None:
        """Raise if a parameter is treated otherwise among others than it is alone."""
        devices = {self._where(part.parameter) for part in parts}
        if len(devices) > 1:
            raise CaptureError(f"its parameters are on {len(devices)} devices")
        together = trace_step(self._optimizer, parts, devices.pop()).outcomes
        for part, among in zip(parts, together, strict=True):
            alone = self._trace(part.group, part.parameter, part.state).outcome
            if alone.lines != among.lines or alone.counters() != among.counters():
                raise CaptureError(
                    "it treats a parameter otherwise where there are others, and a plan updates"
                    " one parameter at a time"
                )


def _begun(value: Any, first: _Alone) -> Make | None:
    """How an entry of the state begins; None if only the first step can tell."""
    if isinstance(value, FakeTensor):
        return _filled(value, first)
    if isinstance(value, torch.Tensor):
        begun = first.spy.begun.get(storage_key(value))
        if begun is None or begun.size() != value.size() or begun.dtype != value.dtype:
            return None
        follows = storage_key(value) in first.spy.following
        return lambda p: begun.to(p.device if follows else CPU, copy=True)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return lambda _: type(value)(0)  # most begin so, and that is compared
    return lambda _: value


def _filled(value: torch.Tensor, first: _Alone) -> Make | None:
    fill = first.spy.fills.get(storage_key(value))
    if fill is None or not _laid_out_alike(fill.results, value):
        return None
    given = [t for t in tensors_of(fill.args) if isinstance(t, FakeTensor)]
    if any(first.outcome.names.get(storage_key(t)) not in ("p", "g") for t in given):
        return None
    positional, named = fill.args

    def made(p: torch.Tensor) -> torch.Tensor:
        own = {**named, "device": p.device} if named.get("device") is not None else named
        args, kwargs = mapped((positional, own), lambda t: p if isinstance(t, FakeTensor) else t)
        return fill.func(*args, **kwargs).detach()

    return made


def _laid_out_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.size(), one.stride()) == (other.size(), other.stride())
    return alike and one.dtype == other.dtype


def _beginning(first: _Alone, key: str) -> str:
    """As text, what an entry of the state begins with."""
    value = first.outcome.state[key]
    if not isinstance(value, torch.Tensor):
        return ""
    if isinstance(value, FakeTensor):
        fill = first.spy.fills.get(storage_key(value))
        return repr(mapped(fill.args, lambda t: tuple(t.size()))) if fill else ""
    begun = first.spy.begun.get(storage_key(value))
    return "" if begun is None else repr(begun.tolist())


def _placeholder(value: Any) -> Make:
    """What stands for an entry until the first step: NaN, in case that somebody uses it."""
    assert isinstance(value, torch.Tensor)
    size, stride, dtype = tuple(value.size()), value.stride(), value.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise CaptureError(f"only its first step can make a state of {dtype}")
    planned = isinstance(value, FakeTensor)

    def made(p: torch.Tensor) -> torch.Tensor:
        device = p.device if planned else CPU
        return torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(float("nan"))

    return made


def _first_value(value: Any, begun: Make | None) -> Any:
    """An entry of the state for a trace: the first step has made it, or it has just begun."""
    keep = isinstance(value, FakeTensor) or begun is None
    return value if keep else begun(torch.empty(()))


def _check_second(first: Outcome, second: Outcome, begun: Sequence[str]) -> None:
    """Raise if the step from a state that was begun is not the first step."""
    after = (first.counters(), list(first.state)), (second.counters(), list(second.state))
    if after[0][0] != after[1][0] or _computing(first, begun) != _computing(second, begun):
        raise CaptureError(
            "its first step differs from the others, and a plan has one step. Take one step with it"
            " before it is captured"
        )


def _computing(outcome: Outcome, begun: Sequence[str]) -> list[str]:
    """The ops as text, without those that begin a state."""
    return [
        line
        for op, line in zip(outcome.ops, outcome.lines, strict=True)
        if not (name_of(op.func) in FILLS and outcome.names.get(storage_key(op.results)) in begun)
    ]


def _counters(state: State) -> dict[str, Any]:
    plain = {k: v for k, v in state.items() if not isinstance(v, FakeTensor)}
    numbers = {
        k: v.item() if isinstance(v, torch.Tensor) else v
        for k, v in plain.items()
        if not isinstance(v, torch.Tensor) or v.numel() == 1
    }
    return {k: v for k, v in numbers.items() if isinstance(v, int | float)}


def _counting(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The counters that a step advances by 1."""
    return [key for key, value in before.items() if after.get(key) == value + 1]


def _set(value: Any, number: int) -> Any:
    return (
        torch.full_like(value, number) if isinstance(value, torch.Tensor) else type(value)(number)
    )


def _frozen(counters: Mapping[str, Any]) -> Counters:
    return tuple(sorted(counters.items()))


def measured_variants(update: StepUpdate) -> list[StepUpdate]:
    """Updates that call all the kernels that this one may call."""
    return [update, *(replace(update, counting=one, late=None) for one in update.variants)]


@contextmanager
def _named(optimizer: Optimizer) -> Iterator[None]:
    """Name the optimizer in what is raised."""
    name = type(optimizer).__name__
    try:
        yield
    except CaptureError as error:
        raise CaptureError(f"optimizer {name} cannot be planned: {error}. {ADVICE}") from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        asked = ValueAsked(f"its step() asks for values ({str(error).splitlines()[0]})")
        raise CaptureError(f"optimizer {name} cannot be planned: {asked}. {ADVICE}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CaptureError(
            f"optimizer {name} cannot be planned: its step() fails on tensors without values"
            f" ({what}). {ADVICE}"
        ) from error
