"""The hooks of modules and callbacks that run in the middle of a step are traced with the step.

    training_step  on_before_zero_grad  on_before_backward | backward
                   on_after_backward  on_before_optimizer_step  configure_gradient_clipping | update

They are called in Lightning's order, callbacks first, with the gradients in `.grad`. What they log
is deferred like every other log call, and what they do to tensors becomes tasks of the graph. Hooks
that need no values therefore do what they do in Lightning, to the last bit.

A run with such hooks is not planned if it has several micro-batches or several ranks, because the
hooks would see other gradients than in an eager run.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from offload import CaptureError
from offload.program.frames import say_frame, user_frame
from offload.torch_seams import gradient_hooks
from offload.watching.value_kinds import StandIn
from trainers.lightning_seams import swap_hook_name
from trainers.offloading.tracing.side_effects import LogCall, TraceNotes

ZERO = "on_before_zero_grad"
BEFORE = "on_before_backward"
AFTER = ("on_after_backward", "on_before_optimizer_step")
CLIPPING = ("configure_gradient_clipping", "clip_gradients")
STEP_HOOKS = (ZERO, BEFORE, *AFTER, *CLIPPING)
"""The hooks that Lightning calls in the middle of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A hook that a module or a callback overrides."""

    owner: Any
    """The module or the callback."""
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(self.owner, self.name)

    def __str__(self) -> str:
        callback = isinstance(self.owner, L.Callback)
        said = f"callback {type(self.owner).__name__} has" if callback else ""
        said = said or f"{type(self.owner).__name__} overrides"
        return f"{said} {self.name} ({where(self.owner, self.name)})"


def hooks_of(trainer: L.Trainer, module: L.LightningModule) -> tuple[Hook, ...]:
    """Return all hooks in mid-step; those of one name are in the order of Lightning's calls."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    found = [
        Hook(owner, name)
        for name in (ZERO, BEFORE, *AFTER)
        for owner in (*callbacks, module)
        if is_overridden(name, owner)
    ]
    return (*found, *(Hook(module, name) for name in CLIPPING if is_overridden(name, module)))


def unplannable(
    hooks: tuple[Hook, ...], trainer: L.Trainer, module: L.LightningModule
) -> Iterator[str]:
    """Yield the reasons why a run with these hooks cannot be planned."""
    if not hooks:
        return
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"{hooks[0]}, and with accumulate_grad_batches={trainer.accumulate_grad_batches} it"
            " would see partial sums of the gradients between the micro-batches"
        )
    if trainer.world_size > 1:
        yield (
            f"{hooks[0]}, and it would see the gradients before those of the"
            f" {trainer.world_size} ranks are averaged"
        )
    known = {p for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
    for name, p in module.named_parameters() if module.automatic_optimization else ():
        if p.requires_grad and p not in known:
            yield (
                f"{hooks[0]}, and the optimizer does not have {name}, which requires a gradient:"
                " its .grad would grow from step to step. Freeze it (requires_grad_(False))"
            )


class Hooks:
    """The hooks that one capture traces."""

    def __init__(self, module: L.LightningModule, optimizer: Optimizer) -> None:
        self._trainer = module.trainer
        self._module = module
        self._optimizer = optimizer
        self._found = hooks_of(self._trainer, module)
        why = next(unplannable(self._found, self._trainer, module), "")
        if why:
            raise CaptureError(why)

    @property
    def after(self) -> bool:
        """Whether one of the hooks reads gradients."""
        return any(hook.name in AFTER for hook in self._found) or self.clip

    @property
    def clip(self) -> bool:
        """Whether the module overrides how gradients are clipped."""
        return any(hook.name in CLIPPING for hook in self._found)

    @property
    def zero(self) -> tuple[Any, ...]:
        """The owners whose `on_before_zero_grad` is traced with the step."""
        return tuple([hook.owner for hook in self._found if hook.name == ZERO])

    def reaches(self) -> Mapping[str, Any]:
        """Return, by name, the objects through which the hooks can reach tensors."""
        found: dict[str, Any] = {"": self._module}
        for hook in self._found:
            if hook.owner is not self._module:
                found[f"{type(hook.owner).__name__}.{hook.name}"] = hook.function
        for name, p in self._module.named_parameters():
            for number, function in gradient_hooks(p).items():
                found[f"{name}.hook{number}"] = function
        return found

    def call_before(self, loss: torch.Tensor, notes: TraceNotes) -> None:
        """Call the hooks between the forward pass and the backward pass."""
        if any(hook.name == ZERO for hook in self._found):
            with _ForbiddenGradients():
                self.call(ZERO, notes, self._optimizer)
        self.call(BEFORE, notes, loss)

    def call_after(self, notes: TraceNotes) -> None:
        """Call the hooks between the backward pass and the update."""
        self.call("on_after_backward", notes)
        self.call("on_before_optimizer_step", notes, self._optimizer)
        if self.clip:
            with self._logs("configure_gradient_clipping", notes):
                self._module.configure_gradient_clipping(
                    self._optimizer,
                    gradient_clip_val=self._trainer.gradient_clip_val,
                    gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,  # type: ignore[arg-type]
                )

    def call(self, name: str, notes: TraceNotes, *args: Any) -> None:
        """Call the hooks of this name."""
        for hook in self._found:
            if hook.name == name:
                first = () if hook.owner is self._module else (self._trainer, self._module)
                with self._logs(name, notes), no_state(self._optimizer):
                    hook.function(*first, *args)

    @contextmanager
    def _logs(self, name: str, notes: TraceNotes) -> Iterator[None]:
        """Mark the log calls of this block, so that they are made later in the name of this
        hook."""
        known = len(notes.calls)
        before = swap_hook_name(self._module, name)
        try:
            yield
        finally:
            swap_hook_name(self._module, before)
        for number in range(known, len(notes.calls)):
            call = notes.calls[number]
            said = partial(_call_within, self._module, name, call)
            notes.calls[number] = replace(call, function=said)


def _call_within(module: Any, hook: str, call: LogCall, *args: Any, **kwargs: Any) -> Any:
    before = swap_hook_name(module, hook)
    try:
        return call.function(*args, **kwargs)
    finally:
        swap_hook_name(module, before)


class SilencedHook:
    """Disables `on_before_zero_grad` after a planned step: the step contains the call already, and
    Lightning would call the hook a second time."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def begin(self, owners: tuple[Any, ...]) -> None:
        for owner in owners:
            own = vars(owner)
            self._kept.append((own, {ZERO: own[ZERO]} if ZERO in own else {}))
            own[ZERO] = _nothing

    def end(self) -> None:
        while self._kept:
            own, before = self._kept.pop()
            own.pop(ZERO, None)
            own.update(before)


def _nothing(*_: Any) -> None:
    pass


class _ForbiddenGradients(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.grad.__get__:  # type: ignore[attr-defined]
            line = say_frame(user_frame(sys._getframe(1)))
            raise CaptureError(
                f"{line}: {ZERO} reads a .grad of the previous step, but a planned step leaves"
                " no gradients behind. Read it in on_before_optimizer_step"
            )
        return func(*args, **(kwargs or {}))


class _ForbiddenState(dict[Any, Any], StandIn):
    who = "a hook"

    def _used(self, *_: Any) -> NoReturn:
        line = say_frame(user_frame(sys._getframe(1)))
        raise CaptureError(
            f"{line}: {self.who} reads the optimizer's state, which does not exist while a step is"
            " traced. Read it in on_train_batch_end"
        )

    __len__ = __getitem__ = __iter__ = __bool__ = __contains__ = _used  # type: ignore[assignment]
    get = keys = values = items = __missing__ = _used  # type: ignore[assignment]


@contextmanager
def no_state(optimizer: Optimizer, who: str = "a hook") -> Iterator[None]:
    """Refuse in this block that `who` reads the optimizer's state."""
    before: Any = optimizer.state
    optimizer.state = forbidden = _ForbiddenState()  # type: ignore[assignment]
    forbidden.who = who
    try:
        yield
    finally:
        optimizer.state = before


def where(thing: Any, method: str) -> str:
    """Return file and line of the user's method."""
    found = vars(thing).get(method) or getattr(type(thing), method)
    function = getattr(found, "__wrapped__", found)
    try:
        file, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
    except (OSError, TypeError):
        return f"{type(thing).__module__}.{type(thing).__qualname__}.{method}"
    return f"{file}:{line}"
