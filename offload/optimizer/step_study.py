"""Finds out what an optimizer's `step()` does to each parameter, before it is planned.

    from an empty state      makes exp_avg = zeros_like(p), step = 0, ..    -> how a state begins
    from that state          the same ops, else the step is refused         -> elementwise? gradient?
    with counters far ahead  which other ops there are                      -> variants, to measure
    all parameters at once   each has the ops that it has alone             -> one task a parameter

Whatever a step does that does not hold for every later step is refused by name.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from offload.errors import CaptureError
from offload.optimizer.step_spy import FILLS, Noted, StepSpy, ValueAsked, changed_by
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
ADVICE = "Use another optimizer, or capture(step) and update outside of it"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a step does to the parameters of one kind."""

    begin: Mapping[str, Make]
    """How each entry of a state that is not there yet begins."""
    late: frozenset[str]
    """Those of them that only the first step can make, from its gradient."""
    states: tuple[str, ...]
    """Keys of states that are planned; all others are counters."""
    steady: State
    """A state as the second step finds it, for tracing."""
    elementwise: bool
    changes_gradient: bool
    variants: tuple[Counters, ...]


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
        state = self._optimizer.state[p]
        with torch.no_grad():
            made = {k: make(p) for k, make in facts.begin.items() if state.get(k) is None}
        state.update(made)
        late = {key: made[key] for key in facts.late}
        return StepUpdate(
            self._optimizer,
            group,
            p,
            facts.states,
            self._where(p),
            facts.elementwise,
            facts.changes_gradient,
            facts.variants,
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

    def _trace(self, group: int, p: torch.Tensor, state: State) -> tuple[Outcome, StepSpy]:
        trace = trace_step(self._optimizer, [Part(group, p, state)], self._where(p))
        return trace.outcomes[0], trace.spy

    def _of(self, group: int, p: torch.Tensor) -> StepFacts:
        kind = self._kind(group, p)
        if kind not in self._facts:
            self._facts[kind] = self._studied(group, p)
        return self._facts[kind]

    def _studied(self, group: int, p: torch.Tensor) -> StepFacts:
        given = dict(self._optimizer.state.get(p, {}))
        first, spy = self._trace(group, p, given)
        if gone := [key for key in given if key not in first.state]:
            raise CaptureError(f"it removes its state {gone[0]!r}")
        begin: dict[str, Make] = {}
        late: set[str] = set()
        found = [first]
        state: dict[str, Any] = {}
        for key, value in first.state.items():
            if (state_now := given.get(key)) is not None or value is None:
                state[key] = state_now
                continue
            begun = _begun(key, value, first, spy)
            begin[key] = begun or _placeholder(key, value)
            late |= {key} if begun is None else set()
            state[key] = value if isinstance(value, FakeTensor) else begin[key](torch.empty(()))
        if begin:
            second, _ = self._trace(group, p, {k: v for k, v in state.items() if k not in late})
            found.append(second)
            _check_second(first, second, set(begin))
        if late:
            found.append(self._trace(group, p, state)[0])
        steady = found[-1]
        states = tuple(k for k, v in steady.state.items() if isinstance(v, FakeTensor))
        return StepFacts(
            begin,
            frozenset(late),
            states,
            state,
            all(one.elementwise for one in found),
            any(one.changes_gradient for one in found),
            self._variants_of(group, p, state, steady, bool(late)),
        )

    def _variants_of(
        self, group: int, p: torch.Tensor, state: State, steady: Outcome, late: bool
    ) -> tuple[Counters, ...]:
        """Counters for which the step calls other kernels than with the present ones."""
        key = group, steady.calls, late, p.dim()
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
                outcome, _ = self._trace(group, p, now)
                seen.setdefault(outcome.calls, before)
                now = dict(outcome.state)

    def _check_apart(self, parts: list[Part]) -> None:
        """Raise if a parameter is treated otherwise among others than it is alone."""
        devices = {self._where(part.parameter) for part in parts}
        if len(devices) > 1:
            raise CaptureError(f"its parameters are on {len(devices)} devices")
        together = trace_step(self._optimizer, parts, devices.pop()).outcomes
        for part, among in zip(parts, together, strict=True):
            alone, _ = self._trace(part.group, part.parameter, part.state)
            if alone.lines != among.lines or alone.counters() != among.counters():
                raise CaptureError(
                    "it treats a parameter otherwise where there are others, and a plan updates"
                    " one parameter at a time"
                )


def _begun(key: str, value: Any, first: Outcome, spy: StepSpy) -> Make | None:
    """How an entry of the state begins; None if the first step makes it of its gradient."""
    if isinstance(value, FakeTensor):
        return _filled(value, first, spy)
    if isinstance(value, torch.Tensor):
        begun = spy.begun.get(storage_key(value))
        if begun is None or begun.size() != value.size() or begun.dtype != value.dtype:
            raise CaptureError(f"nobody can tell how its state {key!r} begins")
        follows = storage_key(value) in spy.following
        return lambda p: begun.to(p.device if follows else CPU, copy=True)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return lambda _: type(value)(0)  # what it is; that is compared
    return lambda _: value


def _filled(value: torch.Tensor, first: Outcome, spy: StepSpy) -> Make | None:
    fill = spy.fills.get(storage_key(value))
    if fill is None or (fill.results.size(), fill.results.stride()) != (
        value.size(),
        value.stride(),
    ):
        return None
    given = [t for t in tensors_of(fill.args) if isinstance(t, FakeTensor)]
    if any(first.names.get(storage_key(t)) not in ("p", "g") for t in given):
        return None
    if name_of(fill.func) == "clone" and not _clones_parameter(fill, first):
        return None
    positional, named = fill.args

    def made(p: torch.Tensor) -> torch.Tensor:
        own = {**named, "device": p.device} if named.get("device") is not None else named
        args, kwargs = mapped((positional, own), lambda t: p if isinstance(t, FakeTensor) else t)
        return fill.func(*args, **kwargs).detach()

    return made


def _clones_parameter(fill: Noted, first: Outcome) -> bool:
    """Whether it copies the parameter as it is before the step."""
    for op in first.ops:
        if op.results is fill.results:
            break
        if any(first.names.get(storage_key(t)) == "p" for t in changed_by(op)):
            return False
    return first.names.get(storage_key(tensors_of(fill.args)[0])) == "p"


def _placeholder(key: str, value: Any) -> Make:
    if not value.is_floating_point():
        raise CaptureError(f"its first step makes its state {key!r}, of {value.dtype}")
    size, stride, dtype = tuple(value.size()), value.stride(), value.dtype

    def made(p: torch.Tensor) -> torch.Tensor:
        empty = torch.empty_strided(size, stride, dtype=dtype, device=p.device)
        return empty.fill_(float("nan"))

    return made


def _check_second(first: Outcome, second: Outcome, begun: set[str]) -> None:
    """Raise if the step from a state that was begun is not the first step."""
    after = (first.counters(), list(first.state)), (second.counters(), list(second.state))
    if after[0][0] != after[1][0] or _computing(first, begun) != _computing(second, begun):
        raise CaptureError(
            "its first step differs from the others, and a plan has one step. Take one step with it"
            " first"
        )


def _computing(outcome: Outcome, begun: set[str]) -> list[str]:
    """The ops as text, without those that begin a state."""
    return [
        line
        for op, line in zip(outcome.ops, outcome.lines, strict=True)
        if not (
            name_of(op.func) in (*FILLS, "clone")
            and outcome.names.get(storage_key(op.results)) in begun
        )
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
