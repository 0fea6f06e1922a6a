"""One trace of an optimizer's `step()` over a few parameters, under a `StepSpy`.

    (group 0, w, its state)  (group 1, b, its state)  --trace_step-->  what it did to each of them

Tensors of one element in the state are counters, unless the step puts something into them that
depends on a gradient.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from offload.errors import CaptureError
from offload.optimizer.step_copies import copy_with, is_torchs, own_step
from offload.optimizer.step_guards import EXACT_OPS, plain_name
from offload.optimizer.step_spy import Depends, Noted, StepSpy, changed_by
from offload.program.trees import mapped
from offload.torch_seams import OF_STEPS, FakeTensor, FakeTensorMode, name_of, storage_key

PLAIN = (int, float, bool, str, type(None))

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter with its group and its state."""

    group: int
    parameter: torch.Tensor
    state: State


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did to one parameter."""

    state: Mapping[str, Any]
    """Its state afterwards: fakes, and counters with their values."""
    lines: tuple[str, ...]
    """Its ops as text, for comparing two traces."""
    ops: tuple[Noted, ...]
    made: tuple[str, ...]
    """Keys of its state that the step made."""
    elementwise: bool
    changes_gradient: bool

    @property
    def calls(self) -> tuple[str, ...]:
        return tuple(str(op.func) for op in self.ops)

    def counters(self) -> dict[str, Any]:
        """The values of the counters afterwards."""
        plain = {k: v for k, v in self.state.items() if not isinstance(v, FakeTensor)}
        return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in plain.items()}


def trace_step(
    optimizer: Optimizer, parts: Sequence[Part], device: torch.device
) -> tuple[Outcome, ...]:
    """Trace `step()`, and say what it does to each part. `device`: where the parameters are said to
    be."""
    dependent: set[tuple[int, str]] = set()
    while True:
        trace = _StepOfParts(optimizer, parts, device, dependent)
        try:
            return trace.run()
        except Depends as found:
            new = trace.keys_of(found.storage) - dependent
            if not new:
                raise CaptureError(
                    "it keeps a single number that depends on weights or gradients. Keep it in a"
                    " tensor like the parameter, torch.zeros_like(p)"
                ) from None
            dependent |= new


class _StepOfParts:
    def __init__(
        self,
        optimizer: Optimizer,
        parts: Sequence[Part],
        device: torch.device,
        dependent: set[tuple[int, str]],
    ) -> None:
        self._optimizer, self._device = optimizer, device
        self._fakes = FakeTensorMode()
        self._parameters: list[torch.Tensor] = []
        self._state: dict[torch.Tensor, dict[str, Any]] = {}
        self._names: list[dict[int, str]] = []
        self._given = [[*part.state] for part in parts]
        groups: dict[int, list[torch.Tensor]] = {}
        real: list[torch.Tensor] = []
        for number, part in enumerate(parts):
            p = torch.nn.Parameter(self._fake(part.parameter))
            p.grad = self._fake(part.parameter)
            state = {
                key: self._held(key, value, (number, key) in dependent)
                for key, value in part.state.items()
            }
            real += [v for v in state.values() if _is_real(v)]
            names = {storage_key(p): "p", storage_key(p.grad): "g"}
            names |= {storage_key(v): k for k, v in state.items() if isinstance(v, FakeTensor)}
            self._names.append(names)
            self._parameters.append(p)
            if state:
                self._state[p] = state
            groups.setdefault(part.group, []).append(p)
        self._settings = [
            {key: _apart(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._copy: Any = copy_with(optimizer, self._settings, groups, self._state)
        for name, value in vars(optimizer).items():
            if name not in ("state", "param_groups", "step"):
                vars(self._copy)[name] = _apart(value)
        self._spy = StepSpy(self._fakes, real, is_torchs(optimizer))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._fakes:
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device
            )

    def _held(self, key: str, value: Any, dependent: bool) -> Any:
        if _is_real(value) and value.numel() == 1 and not dependent:
            return value.detach().to("cpu", copy=True)
        if isinstance(value, torch.Tensor):
            return self._fake(value)
        if not isinstance(value, PLAIN):
            raise CaptureError(
                f"its state {key!r} is a {type(value).__name__}: keep tensors and numbers only"
            )
        return value

    def keys_of(self, storage: int) -> set[tuple[int, str]]:
        return {
            (number, key)
            for number, p in enumerate(self._parameters)
            for key, value in self._state.get(p, {}).items()
            if _is_real(value) and storage_key(value) == storage
        }

    def run(self) -> tuple[Outcome, ...]:
        step = own_step(self._optimizer)
        with torch.no_grad(), self._spy:
            step(self._copy)
        self._check_rest()
        owners = self._owners()
        return tuple(self._outcome(n, owners) for n in range(len(owners)))

    def _check_rest(self) -> None:
        """Raise if the step changed anything but parameters and their state."""
        for name, value in vars(self._copy).items():
            before = vars(self._optimizer).get(name, _check_rest_missing)
            known = name in OF_STEPS or name in ("state", "param_groups")
            if not known and not _same(value, before):
                raise CaptureError(
                    f"it changes its attribute {name!r}, once a step. Keep it in the state of each"
                    " parameter, self.state[p]"
                )
        for number, (now, before) in enumerate(
            zip(self._copy.param_groups, self._settings, strict=True)
        ):
            for key in now:
                if key != "params" and not _same(now[key], before.get(key, _check_rest_missing)):
                    raise CaptureError(
                        f"it changes {key!r} of group {number}, once a step. Keep it in the state"
                        " of each parameter, self.state[p]"
                    )

    def _owners(self) -> list[list[Noted]]:
        """The ops of each parameter. An error if an op has tensors of two."""
        owner = {key: number for number, names in enumerate(self._names) for key in names}
        ops: list[list[Noted]] = [[] for _ in self._names]
        for one in self._spy.noted:
            found = {owner[storage_key(t)] for t in one.fakes if storage_key(t) in owner}
            if len(found) > 1:
                raise CaptureError(
                    f"it combines several parameters or their gradients ({one.func}). A plan"
                    " updates one parameter at a time, so do that in a hook before the step"
                )
            mine = found.pop() if found else 0
            for t in one.fakes:
                owner.setdefault(storage_key(t), mine)
            ops[mine].append(one)
        return ops

    def _outcome(self, number: int, owners: Sequence[Sequence[Noted]]) -> Outcome:
        p, ops = self._parameters[number], owners[number]
        assert p.grad is not None
        gradient = storage_key(p.grad)
        state = dict(self._copy.state.get(p, {}))
        kept = {storage_key(v): k for k, v in state.items() if isinstance(v, FakeTensor)}
        names = {**kept, **self._names[number]}
        return Outcome(
            state=state,
            made=tuple(key for key in state if key not in self._given[number]),
            lines=tuple(_line(op, names) for op in ops),
            ops=tuple(ops),
            elementwise=all(_elementwise(op, p) for op in ops) and not self._spy.asks,
            changes_gradient=any(gradient in map(storage_key, changed_by(op)) for op in ops),
        )


_check_rest_missing = object()


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _apart(value: Any) -> Any:
    """A copy of what a step might change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() == 1 else value
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.numel() == other.numel() == 1 and one.item() == other.item()
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return type(one) is type(other) and bool(one == other)


def _elementwise(op: Noted, p: torch.Tensor) -> bool:
    name = name_of(op.func)
    fused = name.startswith("_fused_")
    exact = plain_name(op.func) in EXACT_OPS or _squares(name, op)
    alike = all(t.size() == p.size() and t.stride() == p.stride() for t in op.fakes)
    return alike and (fused or exact)


def _squares(name: str, op: Noted) -> bool:
    positional, _ = op.args
    return name in ("pow", "pow_") and positional[1:] == (2,)


def _line(op: Noted, names: dict[int, str]) -> str:
    def said(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return ("number", tensor.tolist(), str(tensor.dtype))
        name = names.setdefault(storage_key(tensor), f"t{len(names)}")
        return (name, str(tensor.dtype), tuple(tensor.size()), tensor.stride())

    return f"{op.func}{mapped(op.args, said)!r} -> {mapped((op.results,), said)!r}"
