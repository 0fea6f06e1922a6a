"""A step of a LightningModule as a function of tensors, and the work around each run of its graph.

    batch --flatten--> tensors --> training_step under the precision plugin's context --> loss / n
             constants: part of the key   validation_step, ...                        --> tensors
                                                   self.log, metrics: side_effects.py

A step is traced twice, the second time with another `batch_idx`, another epoch and other learning
rates. If the two traces differ, the step is refused: a graph would freeze what must change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import lightning as L
import torch

from offload import CaptureError, TracesDiffer
from offload.torch_seams import LAST_RATES, swap_last_rates
from offload.watching.state_reads import StateReads
from offload.watching.watched_state import WatchedState
from trainers.offloading.tracing.batch_parts import BatchParts
from trainers.offloading.tracing.batch_texts import stand_ins
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

    def loss(self, outputs: Sequence[Any], given: Sequence[Any]) -> torch.Tensor:
        output = filled(self.output, outputs, given)
        return output["loss"] if isinstance(output, dict) else output

    def serve(
        self, outputs: Sequence[Any], given: Sequence[Any], context: Callable[[], Any]
    ) -> Any:
        """Make the deferred calls, and return what the step returns."""
        results: list[Any] = []
        if self.calls:
            with context():
                results = say(self.calls, outputs, given)
        return filled(self.output, outputs, given, results)


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
    reads_epoch: bool = False
    """Whether the step computes with the epoch, so that each epoch has a graph of its own."""


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
        for group in _groups(self._trainer):
            self.reads.ignore(group, "lr")
        for scheduler in _schedulers(self._trainer):
            self.reads.ignore(vars(scheduler), LAST_RATES)
        if given.reads_epoch:
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
        batch = given.batch.rebuilt(tensors, stand_ins(given.batch.names, second))
        context = getattr(self._trainer.precision_plugin, CONTEXTS[given.kind])
        with self._around(notes, second), context():
            with self.reads.paused():
                numbers = [_plain(live.read()) for live in _live_numbers(self._trainer)]
            self._numbers.append(numbers)
            method = getattr(self._module, given.kind)
            output = method(batch, *self._index(second), *given.more)
            self._seen.append((notes.slots(output), notes))
        return output, notes

    @contextmanager
    def _around(self, notes: TraceNotes, second: bool) -> Iterator[None]:
        """Surround every call of the user's Python code in a trace."""
        with ExitStack() as around:
            with self.reads.paused():
                around.enter_context(_moved(self._trainer, self._given, second))
                around.enter_context(put_off(self._module, notes, self._given.kind))
                around.enter_context(no_loggers(self._trainer, self._given.kind))
            try:
                yield
            finally:
                with self.reads.paused():
                    around.close()

    def _index(self, second: bool) -> tuple[int, ...]:
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
        given = (_plain(first), _plain(second))
        if all(type(number) in (int, float) for number in given) and given[0] != given[1]:
            numbers_of_both = self._numbers[0], self._numbers[-1]
            for live, *numbers in zip(_live_numbers(self._trainer), *numbers_of_both, strict=True):
                if tuple(numbers) == given:
                    return live
        return given[at]


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, OpaqueProgress) else number


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
def _moved(trainer: L.Trainer, given: StepArguments, really: bool) -> Iterator[None]:
    """Give the trainer another epoch, global step and learning rates in this block if `really`. A
    step that computes with the epoch keeps it."""
    kind = given.kind
    epoch: Any = trainer.fit_loop.epoch_progress.current
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    before = epoch.processed, epoch.completed, steps.completed
    rates = [(group, group["lr"]) for group in _groups(trainer)]
    last = [(scheduler, scheduler.get_last_lr()) for scheduler in _schedulers(trainer)]
    try:
        # Each moves by another amount, so that they can be told apart.
        if not given.reads_epoch:
            epoch.processed = OpaqueEpoch.of(kind, epoch.processed + 3 * really)
            epoch.completed = OpaqueEpoch.of(kind, epoch.completed + 3 * really)
        steps.completed = OpaqueProgress.of(kind, steps.completed + 7 * really)
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
