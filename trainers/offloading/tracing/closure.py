"""A step of a LightningModule as a function of tensors, and the work around each run of its graph.

    batch --flatten--> tensors --> training_step under the precision plugin's context --> loss / n
             constants: part of the key   validation_step, ...                        --> tensors
                                                   self.log, metrics: side_effects.py

A step is traced twice, the second time with another `batch_idx`, another epoch and other learning
rates. If the two traces differ, the step is refused: a graph would freeze what must change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import lightning as L
import torch

from offload import CaptureError, TracesDiffer
from offload.torch_seams import LAST_RATES, swap_last_rates
from offload.watching.state_reads import StateReads
from offload.watching.watched_state import WatchedState
from trainers.offloading.tracing.batch_changes import BatchChanges
from trainers.offloading.tracing.batch_parts import BatchParts
from trainers.offloading.tracing.batch_texts import stand_ins
from trainers.offloading.tracing.gathered_lists import GatheredList, gathered
from trainers.offloading.tracing.guarded_numbers import GuardedNumber, NumberGuards
from trainers.offloading.tracing.hooked_weights import hooked_weights, put_off_hooked
from trainers.offloading.tracing.hooks import Hooks
from trainers.offloading.tracing.opaque_numbers import (
    OpaqueEpoch,
    OpaqueNumber,
    OpaqueProgress,
    no_loggers,
)
from trainers.offloading.tracing.side_effects import (
    LiveNumber,
    LogCall,
    TraceNotes,
    described,
    filled,
    put_off,
    say,
)
from trainers.offloading.tracing.step_traits import StepTraits

CONTEXTS = MappingProxyType(
    {
        "training_step": "train_step_context",
        "validation_step": "val_step_context",
        "test_step": "test_step_context",
        "predict_step": "predict_step_context",
    }
)
"""The context of the precision plugin for each method of the module."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRecipe:
    """Makes the step's return value and its deferred calls from the outputs of its graph."""

    output: Any
    """What the step returned, with slots in place of tensors."""
    calls: tuple[LogCall, ...]
    watched: WatchedState
    """The graph may only be used while these values are unchanged."""
    numbers: NumberGuards = field(default_factory=NumberGuards)
    """And while the trainer's numbers have the answers that they had."""

    def loss(self, outputs: Sequence[Any], given: Sequence[Any]) -> torch.Tensor:
        return loss_in(filled(self.output, outputs, given))

    def serve(
        self, outputs: Sequence[Any], given: Sequence[Any], context: Callable[[], Any]
    ) -> Any:
        """Make the deferred calls, and return what the step returns."""
        results: list[Any] = []
        if self.calls:
            with context():
                results = say(self.calls, outputs, given)
        return filled(self.output, outputs, given, results)


def loss_in(output: Any) -> torch.Tensor:
    """The loss that a step has returned; 0 for a step that optimizes by hand and returns none."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, torch.Tensor) else torch.zeros(())


@dataclass(frozen=True, slots=True, eq=False)
class StepArguments:
    """The arguments with which Lightning calls a step."""

    kind: str
    """The module's method: training_step, validation_step, test_step or predict_step."""
    batch: BatchParts
    batch_idx: int | None = None
    """This is None if the method does not take it."""
    more: tuple[Any, ...] = ()
    """This is the dataloader's index if there are several."""
    traits: StepTraits = field(default_factory=StepTraits)
    """What is known of the steps of this kind."""


class TracedStep:
    """Calls a step under a tracer, and keeps the notes of every trace."""

    def __init__(self, module: L.LightningModule, given: StepArguments) -> None:
        self._module = module
        self._trainer = module.trainer
        self._given = given
        self._seen: list[tuple[Any, TraceNotes]] = []
        self._numbers: list[list[Any]] = []
        """The trainer's numbers in every trace, in the order of `_live_numbers`."""
        self.reads = StateReads()
        """The Python values that the step reads and writes."""
        self._lists: dict[str, GatheredList] = {}
        """The stand-ins of the latest trace for lists of the module."""
        self._appended: frozenset[str] = frozenset()
        """Those to which the first trace has appended."""
        for group in _groups(self._trainer):
            self.reads.ignore(group, "lr")
        for scheduler in _schedulers(self._trainer):
            self.reads.ignore(vars(scheduler), LAST_RATES)
        for _, own, name in hooked_weights(module):
            self.reads.ignore(own, name)
        if given.traits.reads_epoch:
            epoch = self._trainer.fit_loop.epoch_progress.current
            self.reads.add(vars(epoch), "completed", "epoch_progress.current")

    def _call(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, TraceNotes]:
        """Call the step; return its output and what was noted."""
        if len(self._seen) == 2:  # both traces are made anew, with what their kernels taught
            self._seen.clear()
            self._numbers.clear()
        notes = TraceNotes(tensors)
        given = self._given
        second = bool(self._seen)
        self._appended = frozenset(n for n, each in self._lists.items() if each.appended)
        self._lists = {}
        batch = given.batch.rebuilt(tensors, stand_ins(given.batch.names, second))
        changes = BatchChanges(batch, len(tensors) + len(given.batch.names))
        context = getattr(self._trainer.precision_plugin, CONTEXTS[given.kind])
        with self._around(notes, second), context():
            with self.reads.paused():
                numbers = [_plain(live.read()) for live in _live_numbers(self._trainer)]
            self._numbers.append(numbers)
            method = getattr(self._module, given.kind)
            with put_off_hooked(self._module, notes):
                output = method(batch, *self._index(second), *given.more)
            notes.write_back()
            changes.put_off(notes)
            self._seen.append((notes.slots(output), notes))
        return output, notes

    @contextmanager
    def _around(self, notes: TraceNotes, second: bool) -> Iterator[None]:
        """Surround every call of the user's Python code in a trace."""
        with ExitStack() as around:
            with self.reads.paused():
                around.enter_context(self._moved(second))
                around.enter_context(put_off(self._module, notes, self._given.kind))
                if self._given.traits.gathers:
                    around.enter_context(self._gathered(notes, second))
                around.enter_context(no_loggers(self._trainer, self._given.kind))
            try:
                yield
            finally:
                with self.reads.paused():
                    around.close()

    @contextmanager
    def _gathered(self, notes: TraceNotes, second: bool) -> Iterator[None]:
        """Put off what the step appends to lists of the module, and watch those that it reads."""
        with gathered(self._module, notes, self._appended if second else (), self._lists):
            yield
        for name in {each.owner for each in self._lists.values() if each.is_watched}:
            self.reads.add(vars(self._module), name, type(self._module).__name__)

    def _moved(self, second: bool) -> AbstractContextManager[None]:
        """Give the trainer other numbers in the second trace."""
        return moved(self._trainer, self._given, second)

    def _index(self, second: bool) -> tuple[Any, ...]:
        batch_idx = self._given.batch_idx
        if batch_idx is None:
            return ()
        # Code that does something every n batches does it at 0, so one of the traces has 0.
        other = 0 if batch_idx else 1
        return (OpaqueNumber.of(self._given.kind, other if second else batch_idx),)

    def recipe(self) -> StepRecipe:
        """Compare the two traces, and return what both have in common. A step that is only traced
        again has one trace."""
        (output, notes), (again, other) = self._seen[0], self._seen[-1]
        calls = tuple(map(self._with_live, notes.calls, other.calls))
        if len(calls) != len(other.calls):
            raise _frozen(f"{len(calls)} calls of self.log and metrics against {len(other.calls)}")
        _compare(output, again)
        return StepRecipe(output, calls, self.reads.state())

    def _with_live(self, one: LogCall, other: LogCall) -> LogCall:
        """Find logged numbers that are numbers of the trainer. A logged number whose two values
        are those of a number of the trainer is replaced by the `LiveNumber` of it."""
        alike = len(one.args) == len(other.args) and one.kwargs.keys() == other.kwargs.keys()
        if one.name == other.name == "self.log" and alike:
            one, other = self._lively(one, other, 0), self._lively(one, other, 1)
        _compare(one, other)
        return one

    def _lively(self, one: LogCall, other: LogCall, at: int) -> LogCall:
        args = tuple(self._live(a, b, at) for a, b in zip(one.args, other.args, strict=True))
        kwargs = {key: self._live(one.kwargs[key], other.kwargs[key], at) for key in one.kwargs}
        return replace(one, args=args, kwargs=kwargs)

    def _live(self, first: Any, second: Any, at: int) -> Any:
        """Return the `LiveNumber` that had these values in the two traces; if there is none, return
        the value of trace `at`."""
        if isinstance(first, GuardedNumber) and first.live is not None:
            return LiveNumber(first.asked.name, first.live)
        given = (_plain(first), _plain(second))
        if all(type(number) in (int, float) for number in given) and given[0] != given[1]:
            numbers_of_both = self._numbers[0], self._numbers[-1]
            for live, *numbers in zip(_live_numbers(self._trainer), *numbers_of_both, strict=True):
                if tuple(numbers) == given:
                    return live
        return given[at]


def _plain(number: Any) -> Any:
    if isinstance(number, GuardedNumber):
        return number.plain
    return int.__int__(number) if isinstance(number, OpaqueProgress) else number


class TrainingForward(TracedStep):
    """A training step under a tracer: `(loss, more) = forward(*tensors)`."""

    def __init__(self, module: L.LightningModule, given: StepArguments, hooks: Hooks) -> None:
        super().__init__(module, given)
        self._hooks = hooks

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, Any]:
        output, notes = self._call(tensors)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor):
            raise CaptureError(
                f"training_step returned {type(loss).__name__} in place of a loss: a step that may"
                " be skipped cannot be planned. Return a loss tensor for every batch"
            )
        normalize = self._trainer.accumulate_grad_batches
        loss = loss if normalize == 1 else loss / normalize
        with self._around(notes, len(self._seen) > 1):
            self._hooks.call_before(loss, notes)
        return loss, notes.checked()

    def after(self) -> tuple[torch.Tensor, ...]:
        """Call the hooks that read the gradients in `.grad`, and return the tensors they log."""
        _, notes = self._seen[-1]
        known = len(notes.tensors)
        with self._around(notes, len(self._seen) > 1):
            self._hooks.call_after(notes)
        return notes.checked()[known:]


def _live_numbers(trainer: L.Trainer) -> list[LiveNumber]:
    """Return the numbers of the trainer that change from step to step and are often logged."""

    def rate(optimizer: int, group: int) -> Any:
        return trainer.optimizers[optimizer].param_groups[group]["lr"]

    return [
        *(
            LiveNumber(f"lr of group {n}", partial(rate, number, n))
            for number, optimizer in enumerate(trainer.optimizers)
            for n in range(len(optimizer.param_groups))
        ),
        *(
            LiveNumber(f"last lr {n} of schedule {number}", partial(_last_rate, scheduler, n))
            for number, scheduler in enumerate(_schedulers(trainer))
            for n in range(len(scheduler.get_last_lr()))
        ),
        LiveNumber("epoch", lambda: trainer.current_epoch),
        LiveNumber("global_step", lambda: trainer.global_step),
    ]


def progress_of(trainer: L.Trainer, by_hand: bool) -> Any:
    """Where Lightning counts the steps of optimizers, `completed`."""
    loop = trainer.fit_loop.epoch_loop
    if by_hand:
        return loop.manual_optimization.optim_step_progress.total
    return loop.automatic_optimization.optim_progress.optimizer.step.total


def _groups(trainer: L.Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _schedulers(trainer: L.Trainer) -> list[Any]:
    """The learning rate schedules that remember the rates that they have set."""
    found = [config.scheduler for config in trainer.lr_scheduler_configs]
    return [scheduler for scheduler in found if isinstance(vars(scheduler).get(LAST_RATES), list)]


def _last_rate(scheduler: Any, number: int) -> Any:
    return scheduler.get_last_lr()[number]


def _compare(one: Any, other: Any) -> None:
    left, right = described(one), described(other)
    if left != right:
        raise _frozen(f"{left} against {right}")


def _frozen(what: str) -> CaptureError:
    return TracesDiffer(
        "the step does or logs different things if batch_idx, the epoch or the learning rate"
        f" differ ({what[:300]}), but a captured step does the same in every batch. Do it in a hook"
        " (on_train_batch_end)"
    )


@contextmanager
def moved(
    trainer: L.Trainer,
    given: StepArguments,
    really: bool,
    progress: GuardedNumber | None = None,
) -> Iterator[None]:
    """Give the trainer another epoch, global step and learning rates in this block if `really`. A
    step that computes with the epoch keeps it. `progress`: the global step, for a step that
    optimizes by hand."""
    kind = given.kind
    epoch: Any = trainer.fit_loop.epoch_progress.current
    steps = progress_of(trainer, progress is not None)
    before = epoch.processed, epoch.completed, steps.completed
    rates = [(group, group["lr"]) for group in _groups(trainer)]
    last = [(scheduler, scheduler.get_last_lr()) for scheduler in _schedulers(trainer)]
    try:
        # Each moves by another amount, so that they can be told apart.
        if not given.traits.reads_epoch:
            epoch.processed = OpaqueEpoch.of(kind, epoch.processed + 3 * really)
            epoch.completed = OpaqueEpoch.of(kind, epoch.completed + 3 * really)
        steps.completed = (
            OpaqueProgress.of(kind, steps.completed + 7 * really) if progress is None else progress
        )
        for number, (group, rate) in enumerate(rates, 1) if really else ():
            group["lr"] = rate * 0.75 + number * 1e-4  # the sum also changes a rate of 0
        for number, (scheduler, rate) in enumerate(last, 1) if really else ():
            swap_last_rates(scheduler, [each * 0.7 + number * 1e-5 for each in rate])
        yield
    finally:
        epoch.processed, epoch.completed, steps.completed = before
        for group, rate in rates:
            group["lr"] = rate
        for scheduler, known in last:
            swap_last_rates(scheduler, known)
