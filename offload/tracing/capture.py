"""Turns a step of a user's program into a TaskGraph bound to the user's tensors.

    step(x, y)   --trace twice-->   Tape   --once-->   tasks over buffers   + one update a parameter

Every storage is a buffer. So a view needs no task, and what a task reads and writes is known
exactly. The graph holds the step's own kernels in the order in which eager calls them. Any order
that keeps their dependencies gives eager's bits.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from offload.caching.plan_cache import PlanCache
from offload.errors import CaptureError
from offload.gate import only_python
from offload.graph.taskgraph import TaskGraph
from offload.lowering.passes import lower
from offload.measuring.fake_answers import Learned, Misjudged
from offload.measuring.profiling import measured
from offload.optimizer.updates import check_settings
from offload.torch_seams import has_gradient_end_hooks, pytree, storage_key
from offload.tracing.building import Build
from offload.tracing.fixed_at_capture import FixedAtCapture
from offload.tracing.gradient_edits import changed_gradients, empty_gradients
from offload.tracing.guards import check_batch, guarded_trace, single_trace
from offload.tracing.questions import AssumedValues
from offload.tracing.ranks import check_ranks
from offload.tracing.recorder import current_recorder
from offload.tracing.sketch import TraceSketch
from offload.tracing.stand_ins import device_of
from offload.tracing.surroundings import Surroundings, surroundings
from offload.tracing.training import Gradients, TrainingStep, parameters_of
from offload.tracing.update_step import Totals, UpdateStep, traced_update
from offload.tracing.updating import Clip
from offload.watching.state_reads import StateReads

Device = torch.device | str | None
ATTEMPTS = 20
"""A trace is made anew at most so often; three times are enough for an LSTM."""


def capture(
    step: Callable[..., Any],
    *example_inputs: torch.Tensor,
    reaches: Mapping[str, Any] | None = None,
    device: Device = None,
    reads: StateReads | None = None,
    learned: Learned | None = None,
    assumed: AssumedValues | None = None,
) -> TaskGraph:
    """The graph of `step(*tensors)`, which returns tensors and closes over whatever it wants.

    `reaches`: the objects, by name, whose tensors and attributes the step may use; without it they
    are looked for in the step's closure. `device`: where the step will run; by default where all
    its tensors are. The tensors themselves are not moved. `reads`: notes which Python values the
    step reads, for a caller who watches them; without it a runner refuses to run the graph once one
    of them has changed.
    `learned`: what earlier captures have learned of kernels whose fakes are wrong. `assumed`: the
    step may ask for values; the graph assumes these answers, and a run raises `AssumptionFailed`
    where one is another. None refuses a step that asks."""

    def trace(known: Learned) -> TaskGraph:
        return traced(
            step,
            *example_inputs,
            reaches=reaches,
            device=device,
            reads=reads,
            learned=known,
            assumed=assumed,
        )

    return made_ready(trace, learned)


def capture_training_step(
    module: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *batch: torch.Tensor,
    device: Device = None,
    cache: PlanCache | None = None,
) -> TaskGraph:
    """The graph of `loss_fn(module(*batch[:-1]), batch[-1])`, its gradients and the update.
    `cache`: what its kernels cost is kept there, and not measured again at the next start."""
    step = training_step_of(module, loss_fn, optimizer)
    return capture_step(step, *batch, device=device, learned=Learned(cache))


def capture_micro_batch(
    module: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    sums: MutableMapping[torch.nn.Parameter, torch.Tensor],
    *batch: torch.Tensor,
    first: bool = False,
    device: Device = None,
) -> TaskGraph:
    """The graph of a micro-batch that updates nothing: it adds its gradients to `sums`.

    `first`: the sums begin with it, whatever they hold; those that are missing are made. Several
    such graphs make one in which a weight comes in once (`in_turn`)."""
    step = replace(
        training_step_of(module, loss_fn, optimizer),
        update=False,
        sums=sums,
        held=frozenset() if first else frozenset(sums),
    )
    return capture_step(step, *batch, device=device)


def capture_step(
    step: TrainingStep,
    *batch: torch.Tensor,
    device: Device = None,
    reads: StateReads | None = None,
    learned: Learned | None = None,
    assumed: AssumedValues | None = None,
) -> TaskGraph:
    """The graph of a training step in all its parts (training.py). `reads`, `learned`, `assumed`:
    see `capture`."""

    def trace(known: Learned) -> TaskGraph:
        return traced_step(step, *batch, device=device, reads=reads, learned=known, assumed=assumed)

    return made_ready(trace, learned)


def capture_update_step(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    totals: Totals,
    clip: Clip | None = None,
    *,
    device: Device = None,
) -> TaskGraph:
    """The graph of `p.grad = totals[p].div(count)`, clipping, and the optimizer's update.

    Its input is the count, a single number in float64: `torch.tensor(64.0, dtype=torch.float64)`.
    The totals are only read; a parameter without one is not updated. `module` names the
    parameters."""
    step = UpdateStep(module, optimizer, dict(totals), clip)
    count = torch.ones((), dtype=torch.float64)
    return made_ready(lambda _: traced_update(step, count, device))


def made_ready(trace: Callable[[Learned], TaskGraph], learned: Learned | None = None) -> TaskGraph:
    """Trace, lower and measure a graph, and do the same when it is captured again for another
    batch. A trace whose fakes were wrong is made anew with what is learned."""
    attempts, learned = ATTEMPTS, learned or Learned()
    while True:
        try:
            return _measured(trace(learned), learned)
        except Misjudged as error:
            attempts -= 1
            if not (attempts and learned.add(error.answers)):
                raise


def _measured(graph: TaskGraph, learned: Learned) -> TaskGraph:
    with only_python():
        ready, program = lower(graph), graph.program
    if program.device.type == "cuda" and not torch.cuda.is_available():
        note = f"not measured: there is no {program.device} here"
        ready = ready.with_tasks(ready.tasks, None, note)
    else:
        ready = measured(ready, learned.kept)
    bound = replace(
        program,
        recapture=lambda *batch: made_ready(lambda _: program.recapture(*batch), learned),
        fixed=ready.program.fixed,
    )
    return replace(ready, program=bound)


def traced(
    step: Callable[..., Any],
    *example_inputs: torch.Tensor,
    reaches: Mapping[str, Any] | None = None,
    device: Device = None,
    reads: StateReads | None = None,
    learned: Learned | None = None,
    assumed: AssumedValues | None = None,
) -> TaskGraph:
    """The graph of a step before lowering: one task a kernel."""
    learned = learned or Learned()
    check_batch(example_inputs)
    around = surroundings({"": step} if reaches is None else reaches)
    place = device_of(device, example_inputs, around.reachable())
    noted = reads or StateReads()
    recorder, result, sketch = guarded_trace(
        step, example_inputs, around, place, noted, learned, assumed
    )
    outputs = result if isinstance(result, tuple) else (result,)
    graph = Build(recorder, around, outputs).finish(
        lambda *batch: traced(step, *batch, reaches=reaches, device=place, learned=learned)
    )
    if reads is not None:
        return sketched(graph, sketch)
    return _fixed(graph, noted, around, None)


def retraced(
    step: Callable[..., Any],
    *example_inputs: torch.Tensor,
    reads: StateReads,
    learned: Learned,
    reaches: Mapping[str, Any] | None = None,
    device: Device = None,
    assumed: AssumedValues | None = None,
) -> TraceSketch:
    """Trace a step that was captured before once more, to compare it with `Program.sketch`."""
    around = surroundings({"": step} if reaches is None else reaches)
    place = device_of(device, example_inputs, around.reachable())
    return single_trace(step, example_inputs, around, place, reads, learned, assumed)


def sketched(graph: TaskGraph, sketch: TraceSketch) -> TaskGraph:
    return replace(graph, program=replace(graph.program, sketch=sketch))


def _fixed(
    graph: TaskGraph, noted: StateReads, around: Surroundings, optimizer: Optimizer | None
) -> TaskGraph:
    """The graph of a direct capture, which says what has changed since."""
    tensors = [t for _, t, in_module in around.tensors.values() if in_module]
    fixed = FixedAtCapture.of(noted.state(), tensors, optimizer)
    return replace(graph, program=replace(graph.program, changed=fixed.changed))


def traced_training_step(
    module: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *batch: torch.Tensor,
    device: Device = None,
) -> TaskGraph:
    """The graph of a training step before lowering: one task a kernel, one update a parameter."""
    return traced_step(training_step_of(module, loss_fn, optimizer), *batch, device=device)


def training_step_of(
    module: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> TrainingStep:
    """The step of `loss_fn(module(*batch[:-1]), batch[-1])`, its gradients and the update."""

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return loss_fn(module(*inputs[:-1]), inputs[-1]), ()

    return TrainingStep(forward, optimizer, {"": module, "loss": loss_fn})


def traced_step(
    step: TrainingStep,
    *batch: torch.Tensor,
    device: Device = None,
    reads: StateReads | None = None,
    learned: Learned | None = None,
    assumed: AssumedValues | None = None,
) -> TaskGraph:
    """The graph of a training step before lowering.

    It returns the loss and whatever else `forward` returns after it."""
    learned = learned or Learned()
    check_batch(batch)
    parameters, around, place = _prepared(step, batch, device)
    changing = [p for _, p in parameters]
    noted = reads or StateReads()
    with empty_gradients(changing):
        recorder, (loss, more, gradients), sketch = guarded_trace(
            _with_gradients(step, changing), batch, around, place, noted, learned, assumed
        )
    if all(g is None for g in gradients) and not step.held:
        raise CaptureError("the loss depends on no parameter of the optimizer: nothing to train")
    with only_python():
        for p in step.held:
            recorder.value(p)  # the sum needs the parameter, even if this micro-batch has no use
        build = Build(recorder, around, (loss, *([more] if more != () else [])))
        Gradients(build, step, parameters, gradients)
        graph = build.finish(
            lambda *other: traced_step(step, *other, device=place, learned=learned)
        )
    if reads is not None:
        return sketched(graph, sketch)
    return _fixed(graph, noted, around, step.optimizer)


def retraced_step(
    step: TrainingStep,
    *batch: torch.Tensor,
    reads: StateReads,
    learned: Learned,
    device: Device = None,
    assumed: AssumedValues | None = None,
) -> TraceSketch:
    """Trace a training step that was captured before once more, to compare it with
    `Program.sketch`."""
    parameters, around, place = _prepared(step, batch, device)
    changing = [p for _, p in parameters]
    with empty_gradients(changing):
        forward = _with_gradients(step, changing)
        return single_trace(forward, batch, around, place, reads, learned, assumed)


def _prepared(
    step: TrainingStep, batch: Sequence[torch.Tensor], device: Device
) -> tuple[Any, Surroundings, torch.device]:
    """The parameters that the step updates, what it can reach, and its device."""
    check_settings(step.optimizer)
    parameters = parameters_of(step.optimizer)
    changing = [p for _, p in parameters]
    around = surroundings(step.reaches).with_others(changing)
    check_parameters(changing, around)
    place = device_of(device, batch, around.reachable())
    if step.ranks is not None:
        check_ranks(place)
    return parameters, around, place


def _with_gradients(
    step: TrainingStep, changing: Sequence[torch.nn.Parameter]
) -> Callable[..., tuple[torch.Tensor, Any, Any]]:
    """The step's forward and backward pass, and what happens to the gradients."""

    def with_gradients(*inputs: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        loss, more = step.forward(*inputs)
        check_loss(loss)
        with _no_autocast():
            gradients = torch.autograd.grad(loss, changing, allow_unused=True)
        if step.after is not None:
            returned = [t for t in pytree.tree_leaves(more) if isinstance(t, torch.Tensor)]
            gradients, too = changed_gradients(
                current_recorder(), changing, gradients, step.after, returned
            )
            more = (more, too)
        return loss.detach(), more, gradients

    return with_gradients


def check_parameters(parameters: Sequence[torch.nn.Parameter], around: Surroundings) -> None:
    if not parameters:
        raise CaptureError("the optimizer has no parameter that requires a gradient")
    for p in parameters:
        if has_gradient_end_hooks(p):
            name, *_ = around.tensors.get(storage_key(p), ("a parameter",))
            raise CaptureError(
                f"{name} has a post-accumulate hook, and a captured step never calls it because it"
                " fills no .grad. Remove the hook"
            )


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Turn autocast off: users call `backward()` outside of the autocast of the forward pass."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"the loss is {what}: return a single number, such as loss.mean()")
    if not loss.requires_grad:
        raise CaptureError(
            "the loss depends on no parameter that requires a gradient: nothing to train"
        )
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if node.name() == "CheckpointFunctionBackward":
            # Reentrant checkpointing runs a backward pass of its own into .grad.
            raise CaptureError(
                "the module uses reentrant checkpointing: give checkpoint() use_reentrant=False"
            )
