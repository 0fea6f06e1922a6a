"""Refuses steps that a graph cannot repeat: each is traced twice and watched from outside.

    python's and numpy's random state    has the trace changed it?      would be one fixed number
    what the step reads and writes       fakes left? counters moved?    metrics, caches, counters
    the two tapes                        equal, op by op?               anything else that differs

A step that fails while it is traced raises `CaptureError` with the user's line and what to do.
Afterwards everything is as it was: attributes, gradients, random states, the autocast cache.
"""

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from offload.errors import CaptureError, TensorsKept, TracesDiffer
from offload.gate import only_python
from offload.measuring.fake_answers import Learned
from offload.program.frames import say_frame, say_traceback, user_frame
from offload.torch_seams import (
    FAKE_LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    compiled_calls,
    is_compiled,
    storage_key,
)
from offload.tracing.draws import Clock
from offload.tracing.questions import AssumedValues
from offload.tracing.recorder import Recorder
from offload.tracing.sketch import TraceSketch
from offload.tracing.stand_ins import standing_in
from offload.tracing.surroundings import Surroundings
from offload.watching.effects import StepEffects
from offload.watching.state_reads import StateReads

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
    reads: StateReads,
    learned: Learned,
    assumed: AssumedValues | None = None,
) -> tuple[Recorder, Any, TraceSketch]:
    """Trace a step twice, and compare the traces.

    What the first trace sets in Python and the second one leaves alone is kept: a step may prepare
    something when it is called for the first time. A step that is refused leaves nothing.
    `assumed`: what it is answered when it asks for values; None refuses that."""
    _check_compiled(around)
    clock = Clock(device, around.generators)
    effects = StepEffects()
    try:
        first, result = _watched_trace(
            step, batch, around, clock, device, reads, effects, learned, assumed
        )
        between = reads.present()
        clock.begin_again()
        second, again = _watched_trace(
            step, batch, around, clock, device, reads, effects, learned, assumed
        )
        if changed := reads.changed_since(between) or effects.repeated():
            raise CaptureError(changed)
        with only_python():
            sketch = TraceSketch.of(first, result, around)
            where, what = sketch.first_difference(TraceSketch.of(second, again, around))
        if what:
            raise _differs(where, what)
    except BaseException:
        reads.put_back()
        raise
    finally:
        clock.restore()
    effects.say()
    return first, result, sketch


def single_trace(
    step: Callable[..., Any],
    batch: Sequence[torch.Tensor],
    around: Surroundings,
    device: torch.device,
    reads: StateReads,
    learned: Learned,
    assumed: AssumedValues | None = None,
) -> TraceSketch:
    """Trace a step once that was captured before, leave nothing of it behind, and return what it
    did. What it still changes in Python is no preparation, and is refused."""
    clock = Clock(device, around.generators)
    effects = StepEffects()
    try:
        recorder, result = _watched_trace(
            step, batch, around, clock, device, reads, effects, learned, assumed
        )
        if changed := reads.changed_since({}) or effects.repeated():
            raise CaptureError(changed)
        return TraceSketch.of(recorder, result, around)
    finally:
        clock.restore()
        reads.put_back()


def _watched_trace(
    step: Callable[..., Any],
    batch: Sequence[torch.Tensor],
    around: Surroundings,
    clock: Clock,
    device: torch.device,
    reads: StateReads,
    effects: StepEffects,
    learned: Learned,
    assumed: AssumedValues | None,
) -> tuple[Recorder, Any]:
    with ExitStack() as stack:
        stack.enter_context(_silenced_log())
        stack.enter_context(_autocast_cache())
        stack.enter_context(_no_optimizer())
        used = stack.enter_context(_random_states_restored())
        stack.enter_context(effects.noted())
        stack.enter_context(reads.noting(around.roots))
        recorder = Recorder(around.modules, clock, device, learned, assumed)
        try:
            with (
                standing_in(around.reachable(), device) as recorder.tape.away,
                compiled_calls(_refuse_compiled),
                _ForbiddenCalls(),
            ):
                result = recorder.run(step, batch)
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error) from error
        finally:
            changes = _restore_tensors(recorder, around)
    if used:
        raise CaptureError(
            f"the step draws from {used[0]}, and every step would use the number drawn now."
            " Draw with torch, or pass the number in as a tensor of the batch"
        )
    if changes:
        raise CaptureError(changes[0])
    if left := reads.left_behind():
        raise TensorsKept(left)
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


def _differs(where: str, what: str) -> CaptureError:
    at = f"{where}: " if where else ""
    return TracesDiffer(
        f"{at}two calls of the step do different things ({what}), so a graph of one cannot replace"
        " the other. Keep python counters and random numbers in tensors"
    )


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
                " Capture the module that was compiled (its ._orig_mod), or do not call .compile()"
            )


def _refuse_compiled() -> None:
    raise _forbidden(
        "the step calls what torch.compile made, whose kernels have other last bits than those"
        " that can be captured",
        "Call what was compiled, as it is",
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
