"""Log calls and metric updates of a traced step are noted, and made after the step has run.

    while it is traced      self.log("loss", loss)     metric(logits, y)   -> DeferredResult
    after every step        module.log("loss", 0.31)   metric(real, real)  in the same order

A traced step has no values. So `self.log` and the methods of torchmetrics are replaced while it is
traced: their tensors become outputs of the graph, and the calls are made with the real values after
the step. The result of such a call is not known during the step, so it can be logged and nothing
else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import lightning as L
import torch
from torchmetrics import Metric, MetricCollection

from offload import CaptureError
from offload.torch_seams import FakeTensor, pytree, version_of
from offload.tracing.recorder import current_recorder
from offload.watching.value_kinds import StandIn
from trainers.offloading.tracing.batch_texts import BatchId, BatchText, Name
from trainers.offloading.tracing.guarded_numbers import GuardedNumber

PLAIN = int | float | complex | str | bytes | None
METHODS = ("forward", "update", "compute", "reset")
SMALL = 4096
"""A logged tensor of at most so many elements is copied; a larger one is kept alive itself."""


@dataclass(frozen=True, slots=True)
class OutputSlot:
    """Stands for output `number` of the graph, or for item `number` of the batch if `given`."""

    number: int
    given: bool = False


@dataclass(frozen=True, slots=True)
class LiveNumber:
    """A number of the trainer that is read again in every step: a learning rate, the epoch."""

    name: str
    read: Callable[[], Any]


class DeferredResult(StandIn):
    """Stands for the result of a metric call that is made after the step."""

    def __init__(self, call: int, what: str) -> None:
        self.__dict__.update(call=call, what=what)

    def __repr__(self) -> str:
        return f"<{self.__dict__['what']} {self.__dict__['call']}>"

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(
            f"the step uses the value of {self.what}, which is only known after the step. Log it"
            " with self.log and do nothing else with it, or compute it from tensors"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __neg__ = _refuse
    __float__ = __int__ = __bool__ = __lt__ = __gt__ = __le__ = __ge__ = __getitem__ = _refuse
    __iter__ = __len__ = __format__ = __contains__ = __eq__ = __ne__ = __hash__ = _refuse  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class LogCall:
    """`function(*args, **kwargs)`: slots stand for tensors, `DeferredResult` for results."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def described(thing: Any) -> str:
    """Describe `thing` without its tensors, so that two traces can be compared."""

    def describe(leaf: Any) -> Any:
        plain = isinstance(leaf, PLAIN | OutputSlot | DeferredResult)
        return repr(leaf) if plain else getattr(leaf, "__qualname__", type(leaf).__qualname__)

    if isinstance(thing, LogCall):
        args, kwargs = pytree.tree_map(describe, (thing.args, thing.kwargs))
        named = [f"{name}={value}" for name, value in kwargs.items()]
        return f"{thing.name}({', '.join(map(str, [*args, *named]))})"
    return str(pytree.tree_map(describe, thing))


@dataclass(slots=True, eq=False)
class TraceNotes:
    """The deferred calls of one trace, and the tensors that they need."""

    given: Sequence[torch.Tensor]
    """These are the tensors of the batch."""
    calls: list[LogCall] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """The graph must return these."""
    _versions: list[int] = field(default_factory=list)

    def slots(self, tree: Any) -> Any:
        """Return `tree` with slots in place of its tensors and of the batch's text."""
        return pytree.tree_map_only((torch.Tensor, BatchText, BatchId), self._slot, tree)

    def _slot(self, tensor: torch.Tensor | Name) -> OutputSlot:
        if isinstance(tensor, BatchText | BatchId):
            return OutputSlot(len(self.given) + tensor.number, given=True)
        for number, given in enumerate(self.given):
            if given is tensor and not current_recorder().writes(tensor):
                return OutputSlot(number, given=True)
        tensor = tensor.detach()
        if (
            tensor.numel() <= SMALL
            or isinstance(tensor, torch.nn.Parameter)
            or not _is_fake(tensor)
        ):
            tensor = tensor.clone()
        self.tensors.append(tensor)
        self._versions.append(version_of(tensor))
        return OutputSlot(len(self.tensors) - 1)

    def call(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> DeferredResult:
        args, kwargs = self.slots((tuple(args), dict(kwargs)))
        self.calls.append(LogCall(name, function, args, kwargs))
        return DeferredResult(len(self.calls) - 1, name)

    def write_back(self) -> None:
        """Have what the step wrote into its batch written into the real one, for hooks and for
        whoever keeps it: a planned step works on a copy."""
        for number, tensor in enumerate(self.given):
            if current_recorder().writes(tensor):
                place = OutputSlot(number, given=True)
                self.calls.append(LogCall("batch", _copy, (place, self._slot(tensor)), {}))

    def checked(self) -> tuple[torch.Tensor, ...]:
        """Return the graph's outputs; refuse a tensor that was changed after it was logged."""
        for tensor, version in zip(self.tensors, self._versions, strict=True):
            if version_of(tensor) != version:
                raise CaptureError(
                    f"the step changes a tensor of shape {tuple(tensor.shape)} in place after it"
                    " was logged or given to a metric. Log a .clone() of it"
                )
        return tuple(self.tensors)


def _copy(given: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        given.copy_(values)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


@contextmanager
def put_off(module: L.LightningModule, notes: TraceNotes, kind: str) -> Iterator[None]:
    """Note the calls of `self.log` and of metrics in this block instead of making them. In
    predict_step, Lightning refuses `self.log` where it is called."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def replace(thing: Any, **methods: Callable[..., Any]) -> None:
        own = thing.__dict__
        kept.append((own, {name: own[name] for name in methods if name in own}))
        own.update(methods)

    def log(*args: Any, **kwargs: Any) -> None:
        notes.call("self.log", lambda *a, **k: type(module).log(module, *a, **k), args, kwargs)

    def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(dictionary, DeferredResult | MetricCollection):
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

        def now(*args: Any, **kwargs: Any) -> DeferredResult:
            return notes.call(f"self.{path}.{method}", later, args, kwargs)

        return now

    if kind != "predict_step":
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


def say(calls: Sequence[LogCall], outputs: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Make the calls in their order, and return their results."""
    results: list[Any] = []
    for call in calls:
        args, kwargs = filled((call.args, call.kwargs), outputs, given, results)
        results.append(call.function(*args, **kwargs))
    return results


def filled(
    tree: Any, outputs: Sequence[Any], given: Sequence[Any], results: Sequence[Any] = ()
) -> Any:
    """Return `tree` with real tensors, numbers and results in place of what stands for them."""

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, OutputSlot):
            return given[leaf.number] if leaf.given else outputs[leaf.number]
        if isinstance(leaf, LiveNumber):
            return leaf.read()
        if isinstance(leaf, GuardedNumber):
            return leaf.plain
        return results[leaf.__dict__["call"]] if isinstance(leaf, DeferredResult) else leaf

    return pytree.tree_map(fill, tree)
