"""A step of a LightningModule's as a function of tensors, and what to do around its graph's runs.

    batch --flatten--> tensors --> training_step under the precision plugin's context --> loss / n
             constants: part of the key   validation_step, ...                        --> tensors
                                                   self.log, metrics: logged.py

It is traced twice, the second time with another `batch_idx`, another epoch and other learning
rates: where these change what is computed, a graph would freeze what must change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from torch.utils import _pytree as pytree

from offload import CaptureError
from trainers.hooks import Hooks
from trainers.logged import Call, Live, Notes, described, filled, put_off, say
from trainers.texts import Text
from trainers.watching import Index, Progress, Reads, Watched, no_loggers

PLAIN = (int, float, complex, str, bytes, bool, type(None))
CONTEXTS = MappingProxyType(
    {
        "training_step": "train_step_context",
        "validation_step": "val_step_context",
        "test_step": "test_step_context",
        "predict_step": "predict_step_context",
    }
)
"""Of the precision plugin, by the module's method."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What is given to `training_step`, taken apart."""

    tensors: tuple[torch.Tensor, ...]
    key: tuple[Any, ...]
    """Equal for two that one graph can serve."""
    leaves: tuple[Any, ...]
    spec: Any
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, batch: Any) -> "Batch":
        leaves, spec = pytree.tree_flatten(batch)
        leaves = [_Mapped.of(leaf) if isinstance(leaf, Mapping) else leaf for leaf in leaves]
        tensors = [tensor for leaf in leaves for tensor in _tensors(leaf)]
        key = (spec, *(_leaf_key(leaf) for leaf in leaves))
        texts = [text for leaf in leaves for text in _texts(leaf)]
        return cls(tuple(tensors), key, tuple(leaves), spec, tuple(texts))

    @property
    def given(self) -> tuple[Any, ...]:
        """What the step may hand on as it is."""
        return (*self.tensors, *self.texts)

    @property
    def loose(self) -> "Batch":
        """With any text, for a step that does not look at it; itself, where there is none."""
        if not self.texts:
            return self
        leaves = tuple(map(_loose, self.leaves))
        return replace(self, leaves=leaves, key=(self.spec, *map(_leaf_key, leaves)))

    def rebuilt(self, tensors: Iterable[torch.Tensor], texts: Iterable[Text] = ()) -> Any:
        """With these in their places; `texts` of a loose one."""
        new, said = iter(tensors), iter(texts)
        leaves = [_rebuilt(leaf, new, said) for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    """A mapping that is no dict, such as transformers' BatchEncoding: made anew from a dict, as
    Lightning does it where it moves a batch."""

    kind: Any
    inside: Batch

    @classmethod
    def of(cls, mapping: Mapping[Any, Any]) -> "_Mapped":
        made: Any = type(mapping)
        inside = dict(mapping)
        if _beside(made(inside)) != _beside(mapping):
            raise CaptureError(
                f"the batch holds a {made.__name__} with more than its items. Give out a dict"
            )
        return cls(made, Batch.of(inside))


def _beside(mapping: Any) -> dict[str, Any]:
    return {name: own for name, own in vars(mapping).items() if not isinstance(own, Mapping)}


def _tensors(leaf: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(leaf, _Mapped):
        return leaf.inside.tensors
    return (leaf,) if isinstance(leaf, torch.Tensor) else ()


def _texts(leaf: Any) -> tuple[str, ...]:
    if isinstance(leaf, _Mapped):
        return leaf.inside.texts
    return (leaf,) if isinstance(leaf, str) else ()


def _loose(leaf: Any) -> Any:
    if isinstance(leaf, _Mapped):
        return replace(leaf, inside=leaf.inside.loose)
    return Text() if isinstance(leaf, str) else leaf


def _rebuilt(leaf: Any, new: Iterator[torch.Tensor], said: Iterator[Text]) -> Any:
    if isinstance(leaf, _Mapped):
        return leaf.kind(leaf.inside.rebuilt(new, said))
    if type(leaf) is Text:
        return next(said)
    return next(new) if isinstance(leaf, torch.Tensor) else leaf


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, _Mapped):
        return (leaf.kind, leaf.inside.key)
    if type(leaf) is Text:
        return (str,)
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad)
    if not isinstance(leaf, PLAIN):
        raise CaptureError(
            f"the batch holds a {type(leaf).__name__}, and only tensors, numbers and text in dicts,"
            " lists and tuples can be told apart from step to step. Give out such (collate_fn)"
        )
    return (type(leaf), leaf)


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """What to do with the outputs of a graph."""

    output: Any
    """What the step returned, with slots."""
    calls: tuple[Call, ...]
    watched: Watched
    """What must be as it was while it was traced."""

    def loss(self, outputs: Sequence[Any], given: Sequence[Any]) -> torch.Tensor:
        output = filled(self.output, outputs, given)
        return output["loss"] if isinstance(output, dict) else output

    def serve(
        self, outputs: Sequence[Any], given: Sequence[Any], context: Callable[[], Any]
    ) -> Any:
        """Log, update the metrics, and return what the step returns."""
        results: list[Any] = []
        if self.calls:
            with context():
                results = say(self.calls, outputs, given)
        return filled(self.output, outputs, given, results)


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What Lightning calls a step with."""

    kind: str
    """The module's method: training_step, validation_step, test_step, predict_step."""
    batch: Batch
    batch_idx: int | None = None
    """None where the method does not take it."""
    more: tuple[Any, ...] = ()
    """The dataloader's index, where there are several."""


class Traced:
    """Calls a step to be traced, and keeps what it says on the side."""

    def __init__(self, module: L.LightningModule, given: Given) -> None:
        self._module = module
        self._trainer = module.trainer
        self._given = given
        self._seen: list[tuple[Any, Notes]] = []
        self._numbers: list[list[Any]] = []
        """Of every trace: what `live_numbers` had."""
        self._reads = Reads()

    def _call(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Notes]:
        """What the step returns."""
        notes = Notes(tensors)
        given = self._given
        second = bool(self._seen)
        batch = given.batch.rebuilt(tensors, Text.several(len(given.batch.texts), second))
        context = getattr(self._trainer.precision_plugin, CONTEXTS[given.kind])
        with self._around(notes, second), context():
            numbers = [_plain(live.read()) for live in _live_numbers(self._trainer)]
            self._numbers.append(numbers)
            method = getattr(self._module, given.kind)
            output = method(batch, *self._index(second), *given.more)
            self._seen.append((notes.slots(output), notes))
        return output, notes

    @contextmanager
    def _around(self, notes: Notes, second: bool) -> Iterator[None]:
        """All python of the user's is called in here."""
        with (
            _moved(self._trainer, self._given.kind, second),
            put_off(self._module, notes),
            no_loggers(self._trainer, self._given.kind),
            self._reads.of(self._module, self._others()),
        ):
            yield

    def _others(self) -> Sequence[Any]:
        """Whose python is called besides the module's."""
        return ()

    def _index(self, second: bool) -> tuple[int, ...]:
        batch_idx = self._given.batch_idx
        if batch_idx is None:
            return ()
        # 0 is what most rules of the kind `every so many batches` do something at.
        other = 0 if batch_idx else 1
        return (Index.of(self._given.kind, other if second else batch_idx),)

    def recipe(self) -> Recipe:
        """After it was traced twice."""
        (output, notes), (again, other) = self._seen
        calls = tuple(map(self._with_live, notes.calls, other.calls))
        if len(calls) != len(other.calls):
            raise _frozen(f"{len(calls)} calls of self.log and metrics against {len(other.calls)}")
        _compare(output, again)
        return Recipe(output, calls, self._reads.watched())

    def _with_live(self, one: Call, other: Call) -> Call:
        """A number that is logged, and that moved as one of the trainer's did, is that one."""
        alike = len(one.args) == len(other.args) and one.kwargs.keys() == other.kwargs.keys()
        if one.name == other.name == "self.log" and alike:
            one, other = self._lively(one, other, 0), self._lively(one, other, 1)
        _compare(one, other)
        return one

    def _lively(self, one: Call, other: Call, at: int) -> Call:
        args = tuple(self._live(a, b, at) for a, b in zip(one.args, other.args, strict=True))
        kwargs = {key: self._live(one.kwargs[key], other.kwargs[key], at) for key in one.kwargs}
        return replace(one, args=args, kwargs=kwargs)

    def _live(self, first: Any, second: Any, at: int) -> Any:
        """What stands for a pair of numbers, one of each trace; or the one of trace `at`."""
        given = (_plain(first), _plain(second))
        if all(type(number) in (int, float) for number in given) and given[0] != given[1]:
            for live, *numbers in zip(_live_numbers(self._trainer), *self._numbers, strict=True):
                if tuple(numbers) == given:
                    return live
        return given[at]


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, Progress) else number


class Forward(Traced):
    """`(loss, more) = forward(*tensors)`: a training step, to be traced."""

    def __init__(self, module: L.LightningModule, given: Given, hooks: Hooks) -> None:
        super().__init__(module, given)
        self._hooks = hooks

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, Any]:
        output, notes = self._call(tensors)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor):
            raise CaptureError(
                f"training_step returned {type(loss).__name__} and no loss: a step that may be"
                " skipped cannot be planned"
            )
        normalize = self._trainer.accumulate_grad_batches
        loss = loss if normalize == 1 else loss / normalize
        with self._around(notes, len(self._seen) > 1):
            self._hooks.call_before(loss, notes)
        return loss, notes.checked()

    def after(self) -> tuple[torch.Tensor, ...]:
        """The hooks that see the gradients of this trace, in `.grad`. What they log."""
        _, notes = self._seen[-1]
        known = len(notes.tensors)
        with self._around(notes, len(self._seen) > 1):
            self._hooks.call_after(notes)
        return notes.checked()[known:]

    def _others(self) -> Sequence[Any]:
        return self._hooks.owners


def _live_numbers(trainer: L.Trainer) -> list[Live]:
    """What people log, and what is another from step to step."""

    def rate(optimizer: int, group: int) -> Any:
        return trainer.optimizers[optimizer].param_groups[group]["lr"]

    return [
        *(
            Live(f"lr of group {n}", partial(rate, number, n))
            for number, optimizer in enumerate(trainer.optimizers)
            for n in range(len(optimizer.param_groups))
        ),
        Live("epoch", lambda: trainer.current_epoch),
        Live("global_step", lambda: trainer.global_step),
    ]


def _compare(one: Any, other: Any) -> None:
    left, right = described(one), described(other)
    if left != right:
        raise _frozen(f"{left} against {right}")


def _frozen(what: str) -> CaptureError:
    return CaptureError(
        f"the step does or logs different things when batch_idx, the epoch or the learning rate"
        f" differ ({what[:300]}), and a captured step would do the same in every batch"
    )


@contextmanager
def _moved(trainer: L.Trainer, kind: str, really: bool) -> Iterator[None]:
    """As it will be in another step: epoch, global step, learning rates."""
    epoch: Any = trainer.fit_loop.epoch_progress.current
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    before = epoch.processed, epoch.completed, steps.completed
    rates = [(group, group["lr"]) for o in trainer.optimizers for group in o.param_groups]
    try:
        # Each by another number, so that one can be told from another.
        epoch.processed = Progress.of(kind, epoch.processed + 3 * really)
        epoch.completed = Progress.of(kind, epoch.completed + 3 * really)
        steps.completed = Progress.of(kind, steps.completed + 7 * really)
        for number, (group, rate) in enumerate(rates, 1) if really else ():
            group["lr"] = rate * 0.75 + number * 1e-4  # it may be 0 now
        yield
    finally:
        epoch.processed, epoch.completed, steps.completed = before
        for group, rate in rates:
            group["lr"] = rate
