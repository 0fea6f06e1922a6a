"""Watches an optimizer's `step()` that computes with its counters only.

    step = 4, 5, ...   real tensors of one element, and numbers     computed
    p, g, exp_avg      fakes, which have no values                  only noted

So the trace takes every branch that depends on a counter as the step would take it now, and stops
where Python asks for a value that depends on a gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.kernels import CPU
from offload.program.trees import mapped, tensors_of
from offload.torch_seams import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    name_of,
    schema_of,
    storage_key,
)

SILENT = frozenset({
    "detach", "alias", "lift_fresh", "device",
    "_record_function_enter_new", "_record_function_exit",
})  # fmt: skip
"""Ops that compute nothing: they are not noted. The last two are the profiler's, around the `step`
of a class of which there was an instance already."""
VALUE = "_local_scalar_dense"


@dataclass(frozen=True, slots=True)
class Noted:
    """An op on fakes, or the part of a foreach op that works on one tensor of each list."""

    func: Any
    args: Any
    results: Any

    @property
    def fakes(self) -> list[torch.Tensor]:
        return [t for t in tensors_of((self.args, self.results)) if isinstance(t, FakeTensor)]


class ValueAsked(CaptureError):
    """The step makes a Python number of a value that is only known while it runs."""


class Depends(Exception):
    """A tensor of one element that was taken for a counter depends on gradients."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.storage = storage_key(tensor)


class StepSpy(TorchDispatchMode):
    """Notes what a step does to fakes, and computes what it does to real tensors."""

    def __init__(
        self,
        fakes: FakeTensorMode,
        own: Sequence[torch.Tensor],
        values: bool,
    ) -> None:
        """`own`: real tensors that the step may change. `values`: whether it may ask for values;
        they are 1."""
        super().__init__()
        self._fakes = fakes
        self._values = values
        self._own = {storage_key(tensor) for tensor in own}
        self._alive: list[Any] = [*own]
        self.noted: list[Noted] = []
        self.asks = False
        """Whether it asked for a value."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = tensors_of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(f"it draws random numbers ({func})")
        if name_of(func) == VALUE and isinstance(args[0], FakeTensor):
            return self._value(args[0])
        if any(isinstance(t, FakeTensor) for t in given):
            return self._noted(func, args, kwargs)
        if given:
            return self._computed(func, args, kwargs)
        return self._made(func, args, kwargs)

    def _value(self, tensor: torch.Tensor) -> Any:
        if not self._values or tensor.dtype == torch.bool:
            raise ValueAsked(
                "it asks for the value of a tensor that depends on weights or gradients (.item(),"
                " float(), an `if` over a tensor)"
            )
        self.asks = True
        return 1.0 if tensor.is_floating_point() else 1

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A tensor made of nothing: a counter if it has one element."""
        with self._fakes:
            fake = func(*args, **kwargs)
        if not isinstance(fake, torch.Tensor):
            return func(*args, **kwargs)
        if fake.numel() != 1:
            self._note(func, args, kwargs, fake)
            return fake
        return self._kept(func(*args, **_on_host(kwargs)))

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for tensor in _changed(func, args, kwargs):
            if storage_key(tensor) not in self._own:
                raise CaptureError(f"it changes a tensor of its own, outside of its state ({func})")
        return self._kept(func(*args, **_on_host(kwargs)))

    def _kept(self, result: Any) -> Any:
        tensors = tensors_of(result)
        self._own |= {storage_key(tensor) for tensor in tensors}
        self._alive += tensors
        return result

    def _noted(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not name_of(func).startswith("_fused_"):
            for tensor in _changed(func, args, kwargs):
                if not isinstance(tensor, FakeTensor):
                    raise Depends(tensor)
        made: dict[int, torch.Tensor] = {}

        def faked(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            device = tensor.device
            if id(tensor) not in made:
                made[id(tensor)] = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
                )
            return made[id(tensor)]

        with self._fakes:
            result = func(*mapped(tuple(args), faked), **mapped(kwargs, faked))
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        self._alive.append((args, kwargs, result))
        if name_of(func) not in SILENT:
            self.noted += split(func, (tuple(args), kwargs), result)


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Counters are computed on the CPU."""
    return {**kwargs, "device": CPU} if kwargs.get("device") is not None else kwargs


def split(func: Any, args: Any, result: Any) -> list[Noted]:
    """A foreach or fused op as one op for each tensor of its lists."""
    if not name_of(func).startswith(("_foreach_", "_fused_")):
        return [Noted(func, args, result)]
    positional, named = args
    many = len(positional[0])

    def at(tree: Any, n: int) -> Any:
        return tree[n] if isinstance(tree, list | tuple) and len(tree) == many else tree

    return [
        Noted(
            func,
            (tuple([at(a, n) for a in positional]), {k: at(a, n) for k, a in named.items()}),
            at(result, n),
        )
        for n in range(many)
    ]


def changed_by(noted: Noted) -> list[torch.Tensor]:
    """The fakes that an op changes in place."""
    positional, named = noted.args
    found = _changed(noted.func, positional, named)
    if name_of(noted.func).startswith("_fused_"):
        found = [t for n, t in enumerate(found) if n != 1]  # only a GradScaler changes gradients
    return [t for t in found if isinstance(t, FakeTensor)]


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for n, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[n] if n < len(args) else kwargs.get(argument.name)
        found += tensors_of((given,))
    return found
