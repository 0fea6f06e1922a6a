"""Refuses steps that a graph cannot repeat: each is traced twice and watched from outside.

    python's and numpy's random state    has the trace changed it?      would be one fixed number
    attributes of modules, objects       fakes left? counters moved?    metrics, caches, counters
    the two tapes                        equal, op by op?               anything else that differs

A step that fails while it is traced raises `CaptureError` with the user's line and what to do.
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
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from offload.errors import CaptureError
from offload.program.frames import say_frame, say_traceback, user_frame
from offload.torch_seams import (
    FAKE_LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    is_compiled,
    storage_key,
)
from offload.tracing.cpu_values import FOLDED
from offload.tracing.draws import Clock
from offload.tracing.recorder import Recorder
from offload.tracing.stand_ins import standing_in
from offload.tracing.surroundings import DEPTH, Surroundings
from offload.tracing.tape import Tape

READS = frozenset({"numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__reduce_ex__"})
"""Calls that would bring real values or addresses of a user's tensor into the trace."""
MIXED_UP = ("at least two devices", "two different devices")
"""Words of the fakes' errors about tensors on several devices."""
ASSIGNMENTS = frozenset({torch.Tensor.data.__set__, torch.Tensor.grad.__set__})  # type: ignore[attr-defined]


def check_batch(batch: Sequence[Any]) -> None:
    """Raise `CaptureError` if an element is not a tensor."""
    for number, thing in enumerate(batch):
        if not isinstance(thing, torch.Tensor):
            raise CaptureError(
                f"element {number} of the batch is a {type(thing).__name__}, and a step takes"
                " tensors. Close over what does not change, or turn it into a tensor"
            )


def guarded_trace(
    step: Callable[..., Any],
    batch: Sequence[torch.Tensor],
    around: Surroundings,
    device: torch.device,
) -> tuple[Recorder, Any]:
    """Trace a step twice, compare the traces, and leave the user's objects as they were."""
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
        stack.enter_context(_silenced_log())
        stack.enter_context(_autocast_cache())
        stack.enter_context(_no_optimizer())
        used = stack.enter_context(_random_states_restored())
        recorder = Recorder(around.modules, clock, device)
        try:
            with standing_in(around.reachable(), device), _ForbiddenCalls():
                result = recorder.run(step, batch)
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error) from error
        finally:
            changes = [change for snapshot in snapshots for change in snapshot.restore()]
            changes += _restore_tensors(recorder, around)
    if used:
        raise CaptureError(
            f"the step draws from {used[0]}, and every step would use the number drawn now."
            " Draw with torch, or pass the number in as a tensor of the batch"
        )
    if changes:
        raise CaptureError(changes[0])
    return recorder, result


def explained(error: Exception) -> CaptureError:
    """Turn a failure of the trace into an error that says where, what, and what to do."""
    where = say_traceback(error.__traceback__)
    if isinstance(error, DataDependentOutputException):
        return CaptureError(
            f"{where}: the step asks for the value of a tensor ({error.func}), as .item(), float()"
            " or `if tensor:` do, but a captured step has no values yet. Keep it a tensor, choose"
            " with torch.where, or return it from the step and read it there"
        )
    if isinstance(error, DynamicOutputShapeException):
        return CaptureError(
            f"{where}: the shape of a result depends on values ({error.func}), as it does for a"
            " boolean mask as index, nonzero or unique. Use torch.where, or multiply by the mask"
        )
    if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
        advice = "Write it without torch.cond, flex_attention and similar operators"
    elif any(words in str(error) for words in MIXED_UP):
        advice = (
            "Make every tensor on the step's device (torch.arange(n, device=x.device)), or register"
            " it as a buffer"
        )
    else:
        advice = "Run it once without capture: if that works, it does what cannot be captured"
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
        f"{at}two calls of the step do different things ({what}), so a graph of one cannot replace"
        " the other. Keep python counters and random numbers in tensors"
    )


def _difference(one: str, other: str) -> str:
    """A little of both texts from where they begin to differ."""
    start = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(start - 12, 0)
    return f"...{one[start : start + 40]} against ...{other[start : start + 40]}"


class _Snapshot:
    """Copies of an object's attributes, and of the lists and dicts in them."""

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
        """Undo what the trace left in the object. Returns messages that tell the user about it."""
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
                f"{path} keeps a tensor of the step (a metric or a cache?), and it has no value"
                " while the step is captured. Return it from the step and keep it outside, or"
                " fill a cache by one eager call first"
            )
        elif isinstance(value, int | float | str) and value != before:
            found.append(
                f"{path} changes from {before!r} to {value!r} in a call, and a captured step"
                " runs no python. Keep it in a tensor (a buffer), or count outside of the step."
                " If only the first call changes it, make one eager call before the capture"
            )


def _containers(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The lists, dicts and sets in a value and in each other, with their paths."""
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
    """Undo what the trace left in `.grad` and autograd history. Returns messages about it."""
    found: list[str] = []
    for tensor, required, gradient in recorder.met:
        name, *_ = around.tensors.get(storage_key(tensor), ("a tensor",))
        if tensor.grad_fn is not None and not required:
            tensor.detach_()
            found.append(
                f"the step adds a tensor with a gradient to {name} in place, so autograd's history"
                " would grow from step to step. Add its .detach() instead"
            )
        if tensor.is_leaf and tensor.grad is not gradient:
            tensor.grad = gradient
            found.append(
                f"the step fills .grad of {name}. Use torch.autograd.grad and return the"
                " gradients, or capture_training_step"
            )
        if tensor.is_leaf and tensor.requires_grad != required:
            tensor.requires_grad_(required)
            found.append(f"the step sets requires_grad of {name}. Set it before the capture")
    return found


class _ForbiddenCalls(TorchFunctionMode):
    """Forbids calls that would bypass the trace."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "backward" and func is torch.Tensor.backward:
            raise _forbidden(
                ".backward() fills .grad where the trace cannot see it",
                "Use torch.autograd.grad and return the gradients, or capture_training_step",
            )
        if func in ASSIGNMENTS:
            raise _forbidden(
                "the step assigns .data or .grad of a tensor",
                "Write into the tensor in place, under torch.no_grad()",
            )
        if name in READS and not isinstance(args[0], FakeTensor):
            raise _forbidden(
                f".{name}() reads a tensor's values into python",
                "Keep it a tensor, or read it before the step and close over the numbers",
            )
        if func is torch.tensor and not kwargs and _are_traced_numbers(*args):
            # The result is the same, and no value is read.
            return torch.stack([number.detach() for number in args[0]])
        return func(*args, **(kwargs or {}))


def _are_traced_numbers(given: Any, *_: Any) -> bool:
    """Whether this is a list of traced single numbers, as Lightning's `grad_norm` makes one."""
    if not isinstance(given, list | tuple) or not given:
        return False
    alike = {(type(t), t.dtype, t.device) if isinstance(t, FakeTensor) else None for t in given}
    return None not in alike and len(alike) == 1 and all(t.dim() == 0 for t in given)


def _forbidden(what: str, advice: str) -> CaptureError:
    return CaptureError(f"{say_frame(user_frame())}: {what}. {advice}")


def _check_compiled(around: Surroundings) -> None:
    for name, thing in around.objects.values():
        if isinstance(thing, torch.nn.Module) and is_compiled(thing):
            raise CaptureError(
                f"{name or 'the module'} is compiled by torch.compile, which hides its kernels."
                " Capture the module that was compiled (its ._orig_mod)"
            )


@contextmanager
def _silenced_log() -> Iterator[None]:
    """Silence the fake mode's log: it repeats the failures that we report ourselves."""
    logger = logging.getLogger(FAKE_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _autocast_cache() -> Iterator[None]:
    """Clear the cache before and after, as between steps, so that no fake stays in it."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _no_optimizer() -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise _forbidden(
            "optimizer.step() changes tensors outside of the step", "Use capture_training_step"
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _random_states_restored() -> Iterator[list[str]]:
    """Restore the random states of python and numpy, and name those that the trace changed."""
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
