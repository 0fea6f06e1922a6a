"""What a trace must not swallow in silence: a step is traced twice, and watched from outside.

    python's and numpy's dice            rolled by the trace?           baked in as one number
    attributes of modules, objects       fakes left? counters moved?    metrics, caches, counters
    the two tapes                        equal, op by op?               whatever else differs

A step that fails while it is traced fails as `CaptureError`, with the user's line and what to do.
Afterwards everything is as it was: attributes, gradients, random states, the autocast cache.
"""

import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from offload.beside import FOLDED
from offload.draws import Clock
from offload.errors import CaptureError
from offload.frames import say_frame, say_traceback, user_frame
from offload.stand_ins import standing_in
from offload.surroundings import DEPTH, Surroundings
from offload.tracing import Recorder, Tape

READS = frozenset({"numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__reduce_ex__"})
"""Of a tensor of the user's: they would bring real values, or addresses, into the trace."""
MIXED_UP = ("at least two devices", "two different devices")
"""What fakes say of tensors on several devices."""
ASSIGNMENTS = frozenset({torch.Tensor.data.__set__, torch.Tensor.grad.__set__})  # type: ignore[attr-defined]


def check_batch(batch: Sequence[Any]) -> None:
    """Raise `CaptureError` where an element is no tensor."""
    for number, thing in enumerate(batch):
        if not isinstance(thing, torch.Tensor):
            raise CaptureError(
                f"element {number} of the batch is a {type(thing).__name__}: a step takes tensors."
                " Close over what does not change, or make a tensor of it"
            )


def guarded_trace(
    step: Callable[..., Any],
    batch: Sequence[torch.Tensor],
    around: Surroundings,
    device: torch.device,
) -> tuple[Recorder, Any]:
    """Trace twice, compare, and leave no mark."""
    _check_compiled(around)
    clock = Clock(device)
    try:
        first, result = _watched_trace(step, batch, around, clock, device)
        second, again = _watched_trace(step, batch, around, clock, device)
    finally:
        clock.restore()
    compare(first.tape, second.tape)
    _compare_results(first, result, second, again)
    return first, result


def _watched_trace(
    step: Callable[..., Any],
    batch: Sequence[torch.Tensor],
    around: Surroundings,
    clock: Clock,
    device: torch.device,
) -> tuple[Recorder, Any]:
    snapshots = [_Snapshot(name, thing) for name, thing in around.objects.values()]
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(_autocast_cache())
        stack.enter_context(_no_optimizer())
        dice = stack.enter_context(_dice())
        recorder = Recorder(around.modules, clock, device)
        try:
            with standing_in(around.reachable(), device), _Strict():
                result = recorder.run(step, batch)
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error) from error
        finally:
            changes = [change for snapshot in snapshots for change in snapshot.restore()]
            changes += _restore_tensors(recorder, around)
    if dice:
        raise CaptureError(
            f"the step draws from {dice[0]}, and the number drawn now would be used in every step."
            " Draw with torch, or pass the number in as a tensor of the batch"
        )
    if changes:
        raise CaptureError(changes[0])
    return recorder, result


def explained(error: Exception) -> CaptureError:
    """The same failure for the user: where, what, and what to do."""
    where = say_traceback(error.__traceback__)
    if isinstance(error, DataDependentOutputException):
        return CaptureError(
            f"{where}: the value of a tensor is asked for ({error.func}), as by .item(), float() or"
            " `if tensor:`, and a captured step has no values yet. Keep it a tensor, choose with"
            " torch.where, or take the value from what the step returns"
        )
    if isinstance(error, DynamicOutputShapeException):
        return CaptureError(
            f"{where}: the shape of a result depends on values ({error.func}), as with a boolean"
            " mask as index, nonzero or unique. Use torch.where, or multiply by the mask"
        )
    if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
        advice = "Write it without torch.cond, flex_attention and their like"
    elif any(words in str(error) for words in MIXED_UP):
        advice = (
            "Make every tensor on the step's device (torch.arange(n, device=x.device)), or register"
            " it as a buffer"
        )
    else:
        advice = "Run it once without capture: if it works there, it does what cannot be captured"
    first = str(error).strip().splitlines() or [""]
    return CaptureError(
        f"{where}: the step failed while it was captured:"
        f" {type(error).__name__}: {first[0][:300]}. {advice}"
    )


def compare(first: Tape, second: Tape) -> None:
    """Raise `CaptureError` at the first op in which two traces of a step differ."""
    for one, other in zip(first.ops, second.ops, strict=False):
        if one.code != other.code:
            raise _differs(one.where, f"{one.name}: {_difference(one.code, other.code)}")
    if len(first.ops) != len(second.ops):
        longer = max(first.ops, second.ops, key=len)
        extra = longer[min(len(first.ops), len(second.ops))]
        raise _differs(extra.where, f"{extra.name} is called only once in two calls")
    for one, other in zip(first.storages, second.storages, strict=False):
        literal = (
            one.kind in ("literal", FOLDED) and one.tensor is not None and other.tensor is not None
        )
        if literal and not torch.equal(one.tensor, other.tensor):  # type: ignore[arg-type]
            raise _differs("", f"{one.name}: a tensor made from python numbers")


def _compare_results(first: Recorder, result: Any, second: Recorder, again: Any) -> None:
    one, other = first.described(result), second.described(again)
    if one != other:
        raise _differs("", f"what it returns: {_difference(one, other)}")


def _differs(where: str, what: str) -> CaptureError:
    at = f"{where}: " if where else ""
    return CaptureError(
        f"{at}two calls of the step do different things ({what}), so that one of them cannot stand"
        " for all. A python counter or python randomness? Keep it in a tensor"
    )


def _difference(one: str, other: str) -> str:
    """A little of both from where they part."""
    start = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(start - 12, 0)
    return f"...{one[start : start + 40]} against ...{other[start : start + 40]}"


class _Snapshot:
    """The attributes of an object, and those of its lists and dicts, as they were."""

    def __init__(self, name: str, thing: Any) -> None:
        self._name = name or type(thing).__name__
        self._thing = thing
        self._before = dict(thing.__dict__)
        self._inner = [
            (path, container, container.copy())
            for key, value in self._before.items()
            for path, container in _containers(f"{self._name}.{key}", value, DEPTH)
        ]

    def restore(self) -> list[str]:
        """What the trace left there, told to the user; it is gone afterwards."""
        found: list[str] = []
        now = self._thing.__dict__
        for key, value in list(now.items()):
            if value is not self._before.get(key, _Snapshot):
                self._tell(found, f"{self._name}.{key}", value, self._before.get(key))
        for path, container, before in self._inner:
            if not _same(container, before):
                for inner, value in _items(container):
                    old = dict(_items(before)).get(inner)
                    if value is not old:
                        self._tell(found, f"{path}[{inner!r}]", value, old)
                _refill(container, before)
        if not _same(now, self._before):
            now.clear()
            now.update(self._before)
        return found

    def _tell(self, found: list[str], path: str, value: Any, before: Any) -> None:
        if _holds_fake(value):
            found.append(
                f"{path} keeps a tensor of the step (a metric, a cache?), which while capturing has"
                " no value. Return it from the step and keep it outside, or fill a cache by one"
                " eager call first"
            )
        elif isinstance(value, int | float | str) and value != before:
            found.append(
                f"{path} changes from {before!r} to {value!r} in a call, and a captured step"
                " runs no python. Keep it in a tensor (a buffer), or count outside of the step."
                " What only the first call does, do by one eager call"
            )


def _containers(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The lists and dicts in a value, and in these, and so on."""
    if isinstance(value, dict | list | set | deque):
        yield path, value
        for key, item in _items(value) if depth and len(value) < 10_000 else ():
            yield from _containers(f"{path}[{key!r}]", item, depth - 1)


def _items(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, dict):
        return list(container.items())
    return list(enumerate(container))


def _same(one: Any, other: Any) -> bool:
    left, right = _items(one), _items(other)
    return len(left) == len(right) and all(
        a == b and x is y for (a, x), (b, y) in zip(left, right, strict=True)
    )


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(before)
    else:
        container.extend(before)


def _holds_fake(value: Any, depth: int = 3) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if depth == 0 or not isinstance(value, dict | list | tuple | set | deque):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return any(_holds_fake(item, depth - 1) for item in inside)


def _restore_tensors(recorder: Recorder, around: Surroundings) -> list[str]:
    """Gradients and autograd history that the trace left on the user's tensors."""
    found: list[str] = []
    for tensor, required, gradient in recorder.met:
        name, *_ = around.tensors.get(tensor.untyped_storage()._cdata, ("a tensor",))
        if tensor.grad_fn is not None and not required:
            tensor.detach_()
            found.append(
                f"the step adds something with a gradient to {name} in place, so that autograd"
                " would go on from step to step. Add its .detach()"
            )
        if tensor.is_leaf and tensor.grad is not gradient:
            tensor.grad = gradient
            found.append(
                f"the step fills the .grad of {name}. Use torch.autograd.grad and return the"
                " gradients, or capture_training_step"
            )
        if tensor.is_leaf and tensor.requires_grad != required:
            tensor.requires_grad_(required)
            found.append(f"the step sets requires_grad of {name}. Set it before the capture")
    return found


class _Strict(TorchFunctionMode):
    """Forbids what would go past the trace."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "backward" and func is torch.Tensor.backward:
            raise _forbidden(
                ".backward() fills .grad behind the step's back",
                "Use torch.autograd.grad and return the gradients, or capture_training_step",
            )
        if func in ASSIGNMENTS:
            raise _forbidden(
                "the .data or the .grad of a tensor is assigned",
                "Write into the tensor in place, under torch.no_grad()",
            )
        if name in READS and not isinstance(args[0], FakeTensor):
            raise _forbidden(
                f".{name}() reads a tensor's values into python",
                "Keep it a tensor, or read it before the step and close over the numbers",
            )
        if func is torch.tensor and not kwargs and _are_traced_numbers(*args):
            return torch.stack([number.detach() for number in args[0]])  # the same, and no values
        return func(*args, **(kwargs or {}))


def _are_traced_numbers(given: Any, *_: Any) -> bool:
    """A list of single numbers, each a tensor of the trace: Lightning's `grad_norm` makes one."""
    if not isinstance(given, list | tuple) or not given:
        return False
    alike = {(type(t), t.dtype, t.device) if isinstance(t, FakeTensor) else None for t in given}
    return None not in alike and len(alike) == 1 and all(t.dim() == 0 for t in given)


def _forbidden(what: str, advice: str) -> CaptureError:
    return CaptureError(f"{say_frame(user_frame())}: {what}. {advice}")


def _check_compiled(around: Surroundings) -> None:
    for name, thing in around.objects.values():
        if isinstance(thing, torch.nn.Module) and hasattr(thing, "_orig_mod"):
            raise CaptureError(
                f"{name or 'the module'} is compiled by torch.compile, which hides its kernels."
                " Capture the module that was compiled (its ._orig_mod)"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """The fake mode logs every failure that we report ourselves."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _autocast_cache() -> Iterator[None]:
    """As at the begin of a step, and none of our fakes in it afterwards."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _no_optimizer() -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise _forbidden(
            "optimizer.step() changes what lies outside of the step", "Use capture_training_step"
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _dice() -> Iterator[list[str]]:
    """Names python's dice that the trace rolled, and puts them back."""
    moved: list[str] = []
    numpy = sys.modules.get("numpy")
    plain = random.getstate()
    arrays = repr(numpy.random.get_state()) if numpy else ""
    kept = numpy.random.get_state() if numpy else None
    try:
        yield moved
    finally:
        if random.getstate() != plain:
            random.setstate(plain)
            moved.append("python's random")
        if numpy and repr(numpy.random.get_state()) != arrays:
            numpy.random.set_state(kept)
            moved.append("numpy.random")
