"""A step that calls `backward()` and its optimizers itself, as one graph.

    forward  backward into .grad  opt_d.step()  zero_grad  forward  backward  opt_g.step()
                                  |                        reads what opt_d has updated
                                  mark on the tape -> one update a parameter, at this place

While it is traced, autograd fills `.grad` with fakes, as it fills it in eager mode. What the step
leaves there is copied into a sum, one for each parameter, which the next step finds in `.grad`.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from offload.errors import CaptureError
from offload.gate import only_python
from offload.graph.taskgraph import Role, TaskGraph
from offload.measuring.fake_answers import Learned
from offload.optimizer.step_updates import StepUpdate
from offload.optimizer.updates import check_settings
from offload.program.frames import say_frame, user_frame
from offload.program.kernels import Value
from offload.torch_seams import storage_key
from offload.tracing.building import Build, PersistentBuffer, copy_of
from offload.tracing.capture import check_loss, check_parameters, made_ready, sketched
from offload.tracing.guards import check_batch, guarded_trace, single_trace
from offload.tracing.questions import AssumedValues
from offload.tracing.recorder import Recorder, current_recorder
from offload.tracing.sketch import TraceSketch
from offload.tracing.stand_ins import device_of
from offload.tracing.surroundings import Surroundings, surroundings
from offload.tracing.tape import FORWARD, UPDATE, StepMark
from offload.tracing.updating import Gradient, Parameter, UpdateTasks
from offload.watching.state_reads import StateReads

Kept = list[tuple[Parameter, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class ManualStep:
    """What a step needs that optimizes by hand."""

    run: Callable[..., tuple[Any, ...]]
    """The step. While it is traced it calls `backward_by_hand` and `step_by_hand`."""
    optimizers: Sequence[Optimizer]
    parameters: Mapping[Parameter, str]
    """All parameters that may get a gradient, and their names."""
    reaches: Mapping[str, Any]
    """What `run` reaches besides its arguments, by name."""
    sums: MutableMapping[Parameter, torch.Tensor]
    """Where gradients stay from one step to the next; a capture makes those that are missing."""
    held: frozenset[Parameter] = frozenset()
    """The parameters whose sum is their `.grad` when the step begins."""
    left: set[Parameter] = field(default_factory=set[Parameter])
    """The parameters that have a gradient when the step is over: a capture says so here."""


# ---- what the step calls while it is traced -----------------------------------------------------


def backward_by_hand(
    loss: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Trace `loss.backward(...)`: autograd itself fills `.grad`, with fakes."""
    recorder = current_recorder()
    if create_graph:
        raise CaptureError(
            f"{say_frame(user_frame())}: backward(create_graph=True) leaves gradients with a"
            " history in .grad. Use torch.autograd.grad(..., create_graph=True) for a penalty"
        )
    if gradient is None:
        check_loss(loss)
    with torch.DisableTorchFunction():
        torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)
    recorder.phase = FORWARD


def step_by_hand(optimizer: Optimizer) -> None:
    """Trace `optimizer.step()` with the gradients that are in `.grad` now."""
    recorder = current_recorder()
    found: list[tuple[int, Parameter, Value, Value]] = []
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.grad is not None:
                _check_plain(p.grad)
                found.append((number, p, recorder.value(p), recorder.value(p.grad)))
    recorder.tape.steps.append(StepMark(len(recorder.tape.ops), optimizer, tuple(found)))
    for _, p, *_ in found:
        # As the update would: a backward pass through the old values must fail, as in eager mode.
        torch.autograd.graph.increment_version(p)


@contextmanager
def changing_gradients() -> Iterator[None]:
    """Ops in this block only work on gradients that are there, and may run as soon as they are."""
    recorder = current_recorder()
    before, recorder.phase = recorder.phase, UPDATE
    try:
        yield
    finally:
        recorder.phase = before


def _check_plain(gradient: torch.Tensor) -> None:
    if gradient.requires_grad:
        raise CaptureError(
            "a .grad has a history of autograd, and a captured step keeps none. Assign .detach()"
        )


class _ByHand(TorchFunctionMode):
    """Allows a step to call `backward()`, and to assign `.grad` of these parameters."""

    def __init__(self, parameters: Mapping[Parameter, str]) -> None:
        super().__init__()
        self._known = {id(p) for p in parameters}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.backward:
            return backward_by_hand(*args, **(kwargs or {}))
        if func == torch.Tensor.grad.__set__:  # type: ignore[attr-defined]
            if id(args[0]) not in self._known:
                raise CaptureError(
                    f"{say_frame(user_frame())}: the step assigns .grad of a tensor that is no"
                    " parameter of the module. Keep that value in another attribute or a buffer"
                )
            with torch.DisableTorchFunction():
                return func(*args)
        return func(*args, **(kwargs or {}))


# ---- the trace ----------------------------------------------------------------------------------


def capture_manual_step(
    step: ManualStep,
    *batch: torch.Tensor,
    device: torch.device,
    reads: StateReads,
    learned: Learned,
    assumed: AssumedValues | None,
) -> TaskGraph:
    """The graph of a step that optimizes by hand. `reads`, `learned`, `assumed`: see `capture`."""

    def trace(known: Learned) -> TaskGraph:
        return traced_manual_step(
            step, *batch, device=device, reads=reads, learned=known, assumed=assumed
        )

    return made_ready(trace, learned)


def traced_manual_step(
    step: ManualStep,
    *batch: torch.Tensor,
    device: torch.device,
    reads: StateReads,
    learned: Learned,
    assumed: AssumedValues | None = None,
) -> TaskGraph:
    """The graph of the step before lowering. It returns what `step.run` returns."""
    around, place = _prepared(step, batch, device)
    recorder, (result, kept), sketch = guarded_trace(
        _whole(step), batch, around, place, reads, learned, assumed
    )
    with only_python():
        tasks = _Steps(step, recorder, kept)
        sums = [storage_key(total) for total in step.sums.values()]
        build = Build(recorder, around, result, tasks.add, sums)
        tasks.keep(build, around)
        graph = build.finish(
            lambda *other: traced_manual_step(
                step, *other, device=place, reads=StateReads(), learned=learned
            )
        )
    step.left.clear()
    step.left.update(p for p, _ in kept)
    return sketched(graph, sketch)


def retraced_manual_step(
    step: ManualStep,
    *batch: torch.Tensor,
    device: torch.device,
    reads: StateReads,
    learned: Learned,
    assumed: AssumedValues | None = None,
) -> TraceSketch:
    """Trace a step that was captured before once more, to compare it with `Program.sketch`."""
    around, place = _prepared(step, batch, device)
    return single_trace(_whole(step), batch, around, place, reads, learned, assumed)


def _prepared(
    step: ManualStep, batch: Sequence[torch.Tensor], device: torch.device
) -> tuple[Surroundings, torch.device]:
    check_batch(batch)
    for optimizer in step.optimizers:
        check_settings(optimizer)
    parameters = [*step.parameters]
    sums = {p: step.sums[p] for p in parameters if p in step.held}
    around = surroundings(step.reaches).with_others([*parameters, *sums.values()])
    check_parameters(parameters, around)
    named = {
        storage_key(total): (f"gradient.{step.parameters[p]}", total, False)
        for p, total in sums.items()
    }
    around = replace(around, tensors={**around.tensors, **named})
    return around, device_of(device, batch, around.reachable())


def _whole(step: ManualStep) -> Callable[..., tuple[Any, Kept]]:
    """The step, which begins with the gradients that it is given; and those that it leaves."""

    def whole(*inputs: torch.Tensor) -> tuple[Any, Kept]:
        recorder = current_recorder()
        before = [(p, p.requires_grad, p.grad) for p in step.parameters]
        recorder.began.update({id(p): (flag, gradient) for p, flag, gradient in before})
        try:
            _assign([(p, step.sums[p] if p in step.held else None) for p in step.parameters])
            with _ByHand(step.parameters):
                result = step.run(*inputs)
            kept: Kept = [(p, p.grad) for p in step.parameters if p.grad is not None]
            for _, gradient in kept:
                _check_plain(gradient)
            return result, kept
        finally:
            _assign([(p, gradient) for p, _, gradient in before])
            for p, flag, _ in before:
                p.requires_grad_(flag)

    return whole


def _assign(gradients: Sequence[tuple[Parameter, torch.Tensor | None]]) -> None:
    with torch.DisableTorchFunction():  # the trace forbids everybody else to assign .grad
        for p, gradient in gradients:
            p.grad = gradient


# ---- the graph ----------------------------------------------------------------------------------


class _Steps:
    """Adds the steps of optimizers to a graph, and what keeps the gradients that are left."""

    def __init__(self, step: ManualStep, recorder: Recorder, kept: Kept) -> None:
        self._step = step
        self._recorder = recorder
        self._kept = [(p, recorder.value(p), recorder.value(g), g) for p, g in kept]
        """Parameters whose gradients are left, where both lie, and the gradient."""
        self._tasks: dict[int, UpdateTasks] = {}

    def add(self, build: Build, mark: StepMark) -> None:
        """Add the updates of one optimizer's step."""
        found = [
            Gradient(group, p, own, self._as_gradient(build, own, g))
            for group, p, own, g in mark.gradients
        ]
        tasks = self._tasks_of(build, mark.optimizer)
        tasks.update(found)
        for gradient in found:
            self._check_unchanged(tasks.update_at(gradient.parameter), mark, gradient)

    def _tasks_of(self, build: Build, optimizer: Optimizer) -> UpdateTasks:
        if id(optimizer) not in self._tasks:
            number = [*map(id, self._step.optimizers)].index(id(optimizer))
            called = "optimizer" if len(self._step.optimizers) == 1 else f"optimizer{number}"
            self._tasks[id(optimizer)] = UpdateTasks(build, optimizer, called=called)
        return self._tasks[id(optimizer)]

    def _as_gradient(self, build: Build, own: Value, g: Value) -> Value:
        """The gradient with the layout of its parameter. It is copied if it lies in another
        persistent tensor than a sum, or in the batch."""
        buffer = build.builder.buffers[g.buffer]
        steps = [(a, b) for a, b, n in zip(own.stride, g.stride, g.size, strict=True) if n > 1]
        taken = (buffer.persistent and buffer.role is not Role.SUM) or buffer.role is Role.INPUT
        if all(a == b for a, b in steps) and g.dtype == own.dtype and not taken:
            if buffer.role is Role.TEMPORARY:
                build.builder.buffers[g.buffer] = replace(buffer, role=Role.GRADIENT)
            return replace(g, stride=own.stride)
        name = f"{build.builder.buffers[own.buffer].name}.gradient"
        nbytes = build.builder.buffers[own.buffer].nbytes
        copy = replace(own, buffer=build.builder.buffer(name, nbytes, Role.GRADIENT), offset=0)
        build.task(name, (g.buffer,), (copy.buffer,), copy_of(copy, g), phase="backward")
        return copy

    def _check_unchanged(self, update: Any, mark: StepMark, gradient: Gradient) -> None:
        """Refuse a step that works in place on a gradient which is used once more."""
        if not isinstance(update, StepUpdate) or not update.changes_gradient:
            return
        b = gradient.value.buffer
        later = self._recorder.tape.ops[mark.after :]
        if any(b in op.reads for op in later) or any(b == g.buffer for _, _, g, _ in self._kept):
            name = type(mark.optimizer).__name__
            raise CaptureError(
                f"optimizer {name}: its step() changes the gradients in place, and they are used"
                " after it, in this step or the next one. Call zero_grad() right after step()"
            )

    def keep(self, build: Build, around: Surroundings) -> None:
        """Copy the gradients that are left into the sums."""
        sums = self._step.sums
        for p, own, g, gradient in self._kept:
            if gradient is sums.get(p):
                continue
            name = f"gradient.{build.builder.buffers[own.buffer].name}"
            if p not in sums:
                sums[p] = torch.zeros_like(p, memory_format=torch.preserve_format).detach()
            total = sums[p]
            if self._recorder.uses(total):
                place = self._recorder.value(total)
            else:
                buffer = PersistentBuffer(name, Role.SUM, total.untyped_storage().nbytes(), total)
                number = build.add_persistent(buffer)
                place = replace(own, buffer=number, stride=total.stride(), offset=0)
            build.task(
                f"{name}.kept", (g.buffer,), (place.buffer,), copy_of(place, g), phase=UPDATE,
                traffic=2 * p.numel() * p.element_size(),
            )  # fmt: skip
