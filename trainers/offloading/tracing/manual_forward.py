"""A training step that optimizes by hand, under a tracer, with stand-ins for what it calls.

    manual_backward, loss.backward   traced by autograd itself     offload/tracing/manual.py
    opt.step(), opt.zero_grad()      marked on the tape, traced; the step is counted after the run
    scheduler.step()                 made after the run, in its place among the log calls
    toggle_optimizer, ...            made while it is traced, and put back
    batch_idx, global_step           may be computed with: a graph serves equal answers

Nothing else of the step is changed: it calls its optimizers in its own order.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import lightning as L
import torch
from torch.optim import Optimizer

from offload import CaptureError
from offload.program.frames import say_frame, user_frame
from offload.tracing.manual import backward_by_hand, changing_gradients, step_by_hand
from offload.watching.value_kinds import StandIn
from trainers.lightning_seams import count_step, swap_toggled
from trainers.offloading.tracing.closure import (
    StepArguments,
    StepRecipe,
    TracedStep,
    moved,
    progress_of,
)
from trainers.offloading.tracing.guarded_numbers import AskedNumber, GuardedNumber, NumberGuards
from trainers.offloading.tracing.hooks import Hooks, no_state
from trainers.offloading.tracing.side_effects import TraceNotes

INDEX, STEPS = "batch_idx", "global_step"
PASSED = ("last_epoch", "_step_count", "num_bad_epochs", "best", "cooldown_counter")
"""What a schedule counts. After its step, a trace does not know it."""


class ManualForward(TracedStep):
    """A training step under a tracer: `tensors = forward(*tensors)`."""

    def __init__(self, module: L.LightningModule, given: StepArguments, hooks: Hooks) -> None:
        super().__init__(module, given)
        self._hooks = hooks
        self._asked: dict[str, list[AskedNumber]] = {INDEX: [], STEPS: []}
        """Both numbers, in each of the two traces."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        module = self._module
        flags = [(p, p.requires_grad) for p in module.parameters()]
        before = swap_toggled(module, {})
        swap_toggled(module, before)
        try:
            _, notes = self._call(tensors)
        finally:
            toggled = swap_toggled(module, before)
        for p, flag in flags:
            if p.requires_grad != flag:
                _put_off_flag(notes, p)
        if toggled != before:
            notes.call("toggle_optimizer", lambda: swap_toggled(module, {**toggled}), (), {})
        return notes.checked()

    def recipe(self) -> StepRecipe:
        asked = self._asked[INDEX][0], self._asked[STEPS][0]
        reads = self._batch_idx, self._global_step
        return replace(
            super().recipe(), numbers=NumberGuards(tuple(zip(asked, reads, strict=True)))
        )

    # ---- the trainer's numbers ------------------------------------------------------------------

    def _batch_idx(self) -> int:
        return self._trainer.fit_loop.epoch_loop.batch_idx

    def _global_step(self) -> int:
        return self._trainer.global_step

    def _number(self, name: str, now: int, second: bool) -> GuardedNumber:
        """The number for a trace: the present one, and then another that has the same answers."""
        known = self._asked[name]
        if not second:
            known.clear()
        number = known[0].another() if second else now
        known.append(AskedNumber(name, number))
        read = self._batch_idx if name == INDEX else self._global_step
        return GuardedNumber(known[-1], number).read_by(read)

    def _index(self, second: bool) -> tuple[Any, ...]:
        with self.reads.paused():
            number = self._number(INDEX, self._batch_idx(), second)
        return () if self._given.batch_idx is None else (number,)

    def _moved(self, second: bool) -> AbstractContextManager[None]:
        steps = self._number(STEPS, self._global_step(), second)
        return moved(self._trainer, self._given, second, steps)

    # ---- the stand-ins --------------------------------------------------------------------------

    @contextmanager
    def _around(self, notes: TraceNotes, second: bool) -> Iterator[None]:
        with ExitStack() as stack:
            with self.reads.paused():
                self._stand_in(notes, stack)
            try:
                with super()._around(notes, second):
                    yield
            finally:
                with self.reads.paused():
                    stack.close()

    def _stand_in(self, notes: TraceNotes, stack: ExitStack) -> None:
        module, trainer = self._module, self._trainer

        def put(thing: Any, **values: Any) -> None:
            stack.enter_context(_replaced(vars(thing), values))

        def manual_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._hooks.call("on_before_backward", notes, loss)
            backward_by_hand(loss, *args, **kwargs)
            self._hooks.call("on_after_backward", notes)

        put(
            module,
            manual_backward=manual_backward,
            toggle_optimizer=self._unnoted(module, "toggle_optimizer", L.LightningModule),
            untoggle_optimizer=self._unnoted(module, "untoggle_optimizer", L.LightningModule),
            clip_gradients=self._clipping(module.clip_gradients),
        )
        stepped: set[int] = set()
        """Ids of the optimizers whose schedule has stepped already."""
        found: Any = module.optimizers()
        wrapped = found if isinstance(found, list) else [found]
        for wrapper, optimizer in zip(wrapped, trainer.optimizers, strict=True):
            step = self._step(optimizer, notes, stepped)
            zero = self._unnoted(optimizer, "zero_grad", Optimizer)
            put(wrapper, step=self._counted(wrapper, optimizer, step, notes), zero_grad=zero)
            put(optimizer, step=step, zero_grad=zero)
            stack.enter_context(no_state(optimizer, "the step"))
        for config in trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            put(scheduler, step=self._schedule(scheduler, notes, stepped, stack))

    def _unnoted(self, owner: Any, name: str, kind: type) -> Callable[..., Any]:
        """A method, whose reads and writes of attributes are no part of the step if it is the
        library's own (that of `kind`)."""
        method = getattr(owner, name)
        if getattr(method, "__func__", None) is not getattr(kind, name):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.reads.paused():
                return method(*args, **kwargs)

        return call

    def _clipping(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def clip_gradients(*args: Any, **kwargs: Any) -> Any:
            with changing_gradients():
                return method(*args, **kwargs)

        return clip_gradients

    def _step(
        self, optimizer: Optimizer, notes: TraceNotes, stepped: set[int]
    ) -> Callable[..., None]:
        """What stands for the `step()` of a torch optimizer."""

        def step(closure: Any = None, **kwargs: Any) -> None:
            name = type(optimizer).__name__
            if closure is not None or kwargs:
                what = "a closure" if closure is not None else f"{next(iter(kwargs))}="
                raise CaptureError(
                    f"{say_frame(user_frame())}: {name}.step() is given {what}, and a captured"
                    " step calls step() alone. Call manual_backward() before step()"
                )
            if id(optimizer) in stepped:
                raise CaptureError(
                    f"{say_frame(user_frame())}: {name} steps after its learning rate schedule, in"
                    " the same training_step, and a captured step reads one learning rate. Call"
                    " the schedule's step() last"
                )
            with self.reads.paused():
                step_by_hand(optimizer)

        return step

    def _counted(
        self,
        wrapper: Any,
        optimizer: Optimizer,
        step: Callable[..., None],
        notes: TraceNotes,
    ) -> Callable[..., None]:
        """What stands for the `step()` of Lightning's optimizer, which also counts."""
        steps = progress_of(self._trainer, True)

        def counted_step(closure: Any = None, **kwargs: Any) -> None:
            if closure is None and not kwargs:
                self._hooks.call("on_before_optimizer_step", notes, optimizer)
            step(closure, **kwargs)
            with self.reads.paused():
                # Whoever logs it now logs it after the step is counted.
                steps.completed = (steps.completed + 1).read_by(self._global_step)
            notes.call("optimizer.step", lambda: count_step(wrapper), (), {})

        return counted_step

    def _schedule(
        self, scheduler: Any, notes: TraceNotes, stepped: set[int], stack: ExitStack
    ) -> Callable[..., None]:
        real = scheduler.step

        def step(*args: Any, **kwargs: Any) -> None:
            with self.reads.paused():
                stepped.add(id(scheduler.optimizer))
                own = vars(scheduler)
                unknown = {name: _Unknown(name) for name in PASSED if name in own}
                stack.enter_context(_replaced(own, unknown))
            notes.call("scheduler.step", real, args, kwargs)

        return step


def _put_off_flag(notes: TraceNotes, p: torch.nn.Parameter) -> None:
    flag = p.requires_grad
    notes.call("requires_grad_", lambda: p.requires_grad_(flag), (), {})


class _Unknown(StandIn):
    """Stands for a number of a schedule whose step is made after the run."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(
            f"{say_frame(user_frame())}: the step reads {self.__dict__['name']} of a learning rate"
            " schedule after its step(), which is made when the captured step is over. Read it"
            " before, or in on_train_batch_end"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse  # type: ignore[assignment]
    __int__ = __float__ = __index__ = __str__ = __format__ = __hash__ = _refuse  # type: ignore[assignment]


@contextmanager
def _replaced(own: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Give an object these attributes in this block."""
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)
        own.update(before)
