"""What a training step says on the side, put off until its values are there.

    while it is traced      self.log("loss", loss)     metric(logits, y)   -> Deferred
    after every step        module.log("loss", 0.31)   metric(real, real)  in the same order

A traced step has no values. So `self.log` and the methods of torchmetrics are replaced while it is
traced: their tensors become outputs of the graph, and the calls are made for real when the outputs
are there, with the arguments that they had. What such a call returns can be logged, and nothing
else: it is not known yet.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import lightning as L
import torch
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from offload import CaptureError
from trainers.texts import Text

PLAIN = int | float | complex | str | bytes | None
METHODS = ("forward", "update", "compute", "reset")
SMALL = 4096
"""Elements of a tensor that is copied when it is logged, rather than kept."""


@dataclass(frozen=True, slots=True)
class Slot:
    """An output of the graph, by its number; of the batch's tensors and text, where `given`."""

    number: int
    given: bool = False


@dataclass(frozen=True, slots=True)
class Live:
    """A number of the trainer's, read anew every step: a learning rate, the epoch."""

    name: str
    read: Callable[[], Any]


class Deferred:
    """What a metric will return."""

    def __init__(self, call: int, what: str) -> None:
        self.__dict__.update(call=call, what=what)

    def __repr__(self) -> str:
        return f"<{self.__dict__['what']} {self.__dict__['call']}>"

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(
            f"the value of {self.what} is used in the step, and it is only known after it. Log it"
            " with self.log and nothing else, or compute it from tensors"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __neg__ = _refuse
    __float__ = __int__ = __bool__ = __lt__ = __gt__ = __le__ = __ge__ = __getitem__ = _refuse
    __iter__ = __len__ = __format__ = __contains__ = _refuse


@dataclass(frozen=True, slots=True)
class Call:
    """`function(*args, **kwargs)`, with slots for tensors and `Deferred` for earlier results."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def described(thing: Any) -> str:
    """For comparing two traces."""

    def describe(leaf: Any) -> Any:
        plain = isinstance(leaf, PLAIN | Slot | Deferred)
        return repr(leaf) if plain else getattr(leaf, "__qualname__", type(leaf).__qualname__)

    if isinstance(thing, Call):
        args, kwargs = pytree.tree_map(describe, (thing.args, thing.kwargs))
        named = [f"{name}={value}" for name, value in kwargs.items()]
        return f"{thing.name}({', '.join(map(str, [*args, *named]))})"
    return str(pytree.tree_map(describe, thing))


@dataclass(slots=True, eq=False)
class Notes:
    """Of one trace."""

    given: Sequence[torch.Tensor]
    """The tensors of the batch."""
    calls: list[Call] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """What the graph must return."""
    _versions: list[int] = field(default_factory=list)

    def slots(self, tree: Any) -> Any:
        """The same with slots for its tensors, and for what stands for the batch's text."""
        return pytree.tree_map_only((torch.Tensor, Text), self._slot, tree)

    def _slot(self, tensor: torch.Tensor | Text) -> Slot:
        if isinstance(tensor, Text):
            return Slot(len(self.given) + tensor.number, given=True)
        for number, given in enumerate(self.given):
            if given is tensor:
                return Slot(number, given=True)
        tensor = tensor.detach()
        if (
            tensor.numel() <= SMALL
            or isinstance(tensor, torch.nn.Parameter)
            or not _is_fake(tensor)
        ):
            tensor = tensor.clone()
        self.tensors.append(tensor)
        self._versions.append(tensor._version)
        return Slot(len(self.tensors) - 1)

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Deferred:
        args, kwargs = self.slots((tuple(args), dict(kwargs)))
        self.calls.append(Call(name, function, args, kwargs))
        return Deferred(len(self.calls) - 1, name)

    def checked(self) -> tuple[torch.Tensor, ...]:
        """Raise `CaptureError` where a tensor was changed after it was given away."""
        for tensor, version in zip(self.tensors, self._versions, strict=True):
            if tensor._version != version:
                raise CaptureError(
                    "a tensor that was logged or given to a metric is changed in place later in the"
                    " step. Give it away as a .clone()"
                )
        return tuple(self.tensors)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


@contextmanager
def put_off(module: L.LightningModule, notes: Notes) -> Iterator[None]:
    """`self.log` and metrics only write down what they are called with."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def replace(thing: Any, **methods: Callable[..., Any]) -> None:
        own = thing.__dict__
        kept.append((own, {name: own[name] for name in methods if name in own}))
        own.update(methods)

    def log(*args: Any, **kwargs: Any) -> None:
        notes.call("self.log", lambda *a, **k: type(module).log(module, *a, **k), args, kwargs)

    def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(dictionary, Deferred | MetricCollection):
            real = type(module).log_dict
            notes.call(
                "self.log_dict", lambda *a, **k: real(module, *a, **k), (dictionary, *args), kwargs
            )
        else:
            type(module).log_dict(module, dictionary, *args, **kwargs)  # which calls self.log

    def metric_method(path: str, metric: Any, method: str) -> Callable[..., Any]:
        def later(*args: Any, **kwargs: Any) -> Any:
            call = metric if method == "forward" else getattr(metric, method)
            return call(*args, **kwargs)

        def now(*args: Any, **kwargs: Any) -> Deferred:
            return notes.call(f"self.{path}.{method}", later, args, kwargs)

        return now

    replace(module, log=log, log_dict=log_dict)
    inside: set[int] = set()
    for path, part in module.named_modules():
        if isinstance(part, Metric | MetricCollection) and id(part) not in inside:
            inside.update(id(child) for child in part.modules() if child is not part)
            replace(part, **{method: metric_method(path, part, method) for method in METHODS})
    try:
        yield
    finally:
        for own, before in reversed(kept):
            for name in (*METHODS, "log", "log_dict"):
                if name in before:
                    own[name] = before[name]
                elif own.get(name) is not None and name in own:
                    del own[name]


def say(calls: Sequence[Call], outputs: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Make the calls, in their order. Returns what they return."""
    results: list[Any] = []
    for call in calls:
        args, kwargs = filled((call.args, call.kwargs), outputs, given, results)
        results.append(call.function(*args, **kwargs))
    return results


def filled(
    tree: Any, outputs: Sequence[Any], given: Sequence[Any], results: Sequence[Any] = ()
) -> Any:
    """Tensors for the slots."""

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return given[leaf.number] if leaf.given else outputs[leaf.number]
        if isinstance(leaf, Live):
            return leaf.read()
        return results[leaf.__dict__["call"]] if isinstance(leaf, Deferred) else leaf

    return pytree.tree_map(fill, tree)
