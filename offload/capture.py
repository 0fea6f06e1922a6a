"""A step of a user's program -> a TaskGraph bound to the user's tensors.

    step(x, y)   --trace twice-->   Tape   --once-->   tasks over buffers   + one update a parameter

Every storage is a buffer, so views are nothing, and what a task reads and writes is exact. The
graph holds the step's own kernels in the order in which eager calls them: run so, or in any order
that keeps the dependencies, it gives eager's bits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offload.errors import CaptureError
from offload.guards import Surroundings, check_batch, guarded_trace, surroundings
from offload.kernels import Call, Program, Source, Value
from offload.lowering import lower
from offload.profiling import measured
from offload.taskgraph import Role, TaskGraph
from offload.tracing import FORWARD, Op, Recorder, Tape
from offload.updates import advance, check_optimizer, update_of

UPDATE = "update"


def capture(
    step: Callable[..., Any], *example_inputs: torch.Tensor, also: Sequence[str] = ()
) -> TaskGraph:
    """The graph of `step(*tensors)`, which returns tensors and closes over whatever it wants.

    `also`: passes that may change the last bits, by name (lowering)."""
    return _ready(traced(step, *example_inputs), also)


def capture_training_step(
    module: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *batch: torch.Tensor,
    also: Sequence[str] = (),
) -> TaskGraph:
    """The graph of `loss_fn(module(*batch[:-1]), batch[-1])`, its gradients and the update."""
    return _ready(traced_training_step(module, loss_fn, optimizer, *batch), also)


def _ready(graph: TaskGraph, also: Sequence[str]) -> TaskGraph:
    """Lowered and measured; and so will be the one for another batch."""
    ready, program = measured(lower(graph, also)), graph.program
    ready.program = replace(
        program, recapture=lambda *batch: _ready(program.recapture(*batch), also)
    )
    return ready


def traced(step: Callable[..., Any], *example_inputs: torch.Tensor) -> TaskGraph:
    """As the step is, kernel by kernel."""
    check_batch(example_inputs)
    around = surroundings({"": step})
    recorder, result = guarded_trace(step, example_inputs, around)
    build = _Build(recorder, around)
    outputs = result if isinstance(result, tuple) else (result,)
    return build.finish(outputs, lambda *batch: traced(step, *batch))


def traced_training_step(
    module: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *batch: torch.Tensor,
) -> TaskGraph:
    """As it is, kernel by kernel, with one update a parameter."""
    check_batch(batch)
    check_optimizer(optimizer)
    around = surroundings({"": module, "loss": loss_fn})
    updated = _updated(optimizer)
    wanted = list(updated.values())
    _check_parameters([p for _, p in wanted], around)

    def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        loss = loss_fn(module(*inputs[:-1]), inputs[-1])
        _check_loss(loss)
        with _no_autocast():
            gradients = torch.autograd.grad(loss, [p for _, p in wanted], allow_unused=True)
        return loss.detach(), gradients

    recorder, (loss, gradients) = guarded_trace(step, batch, around)
    if all(g is None for g in gradients):
        raise CaptureError("the loss depends on no parameter of the optimizer: nothing to train")
    build = _Build(recorder, around)
    build.updates(optimizer, wanted, gradients)
    return build.finish(
        (loss,), lambda *other: traced_training_step(module, loss_fn, optimizer, *other)
    )


def _updated(
    optimizer: torch.optim.Optimizer,
) -> dict[int, tuple[int, torch.nn.Parameter]]:
    """Every parameter that the optimizer changes, once, with the number of its group."""
    return {
        id(p): (number, p)
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p.requires_grad
    }


def _check_parameters(parameters: Sequence[torch.nn.Parameter], around: Surroundings) -> None:
    if not parameters:
        raise CaptureError("the optimizer has no parameter that requires a gradient")
    for p in parameters:
        if getattr(p, "_post_accumulate_grad_hooks", None):
            name, *_ = around.tensors.get(p.untyped_storage()._cdata, ("a parameter",))
            raise CaptureError(
                f"{name} has a post-accumulate hook, which would never be called: there is no .grad"
                " in a captured step. Remove it"
            )


@contextmanager
def _no_autocast() -> Iterator[None]:
    """`backward()` is called outside of the context that is around the forward pass."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _check_loss(loss: Any) -> None:
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
            # It runs a backward pass of its own into .grad.
            raise CaptureError(
                "the module uses reentrant checkpointing: give checkpoint() use_reentrant=False"
            )


@dataclass(frozen=True, slots=True)
class _Home:
    """What a persistent buffer is called and whose bytes it holds."""

    name: str
    role: Role
    nbytes: int
    source: Source


class _Build:
    """Reads a tape once, op by op, into a graph."""

    def __init__(self, recorder: Recorder, around: Surroundings) -> None:
        self._recorder = recorder
        self._tape: Tape = recorder.tape
        self._around = around
        self._graph = TaskGraph()
        self._tensors: dict[str, Source] = {}
        self._written: set[int] = set()
        self._random: tuple[int, ...] = ()
        self._after_step: list[Callable[[], None]] = []
        self._buffers()
        for op in self._tape.ops:
            self._op(op)

    def _buffers(self) -> None:
        """One for each storage, by the same number."""
        homes: dict[int, _Home] = {}
        copied: list[int] = []
        for number, storage in enumerate(self._tape.storages):
            if storage.kind == "real":
                homes[number] = self._home(number)
            elif storage.kind == "literal":
                if storage.written:
                    copied.append(number)
                else:
                    homes[number] = _literal(number, storage)
        activations = _activations(self._tape)
        for number, storage in enumerate(self._tape.storages):
            if (home := homes.get(number)) is not None:
                self._persistent(home)
                continue
            role = Role.ACTIVATION if number in activations else Role.TEMPORARY
            role = Role.INPUT if storage.kind == "input" else role
            if role is Role.INPUT:
                self._written.add(number)
            self._graph.buffer(storage.name, storage.nbytes, role)
        for number in copied:
            self._copy_literal(number)

    def _home(self, number: int) -> _Home:
        storage = self._tape.storages[number]
        tensor = _given(storage)
        unknown = (f"constant.{number}", tensor, False)
        key = tensor.untyped_storage()._cdata
        name, tensor, in_module = self._around.tensors.get(key, unknown)
        if isinstance(tensor, torch.nn.Parameter):
            role = Role.PARAMETER
        else:
            role = Role.BUFFER if storage.written or in_module else Role.CONSTANT
        # A view that stayed behind would not see what the step writes.
        sharing = {id(t): t for t in (*self._around.sharing.get(key, ()), _given(storage))}
        source = tuple(sharing.values()) if len(sharing) > 1 else tensor
        return _Home(name, role, storage.nbytes, source)

    def _persistent(self, home: _Home) -> int:
        self._tensors[home.name] = home.source
        number = self._graph.buffer(home.name, home.nbytes, home.role)
        self._written.add(number)
        return number

    def _copy_literal(self, number: int) -> None:
        """The step changes it, so that it is made anew every step."""
        tensor = _given(self._tape.storages[number])
        source = self._persistent(_literal(number, self._tape.storages[number]))
        value = Value(source, tensor.dtype, tuple(tensor.size()), tensor.stride())
        copy = replace(value, buffer=number)
        self._task(f"literal.{number}.copy", (source,), (number,), _copy(copy, value))

    def _op(self, op: Op) -> None:
        # Bytes that nobody has written yet are no contents that one could read.
        unborn = [b for b in op.reads if b not in self._written]
        reads = [b for b in op.reads if b in self._written]
        writes = dict.fromkeys((*op.writes, *unborn))
        number = self._task(
            op.name,
            reads,
            writes,
            Call(op.func, op.args, op.kwargs, op.outputs),
            phase=self._phase(op),
            after=self._random if op.random else (),
            flops=op.flops,
            traffic=op.traffic,
            repeatable=not op.changes and not op.random,
            pointwise=torch.Tag.pointwise in op.func.tags,
            where=op.where,
        )
        if op.random:
            self._random = (number,)

    def _phase(self, op: Op) -> str:
        parameters = any(self._graph.buffers[b].role is Role.PARAMETER for b in op.changes)
        return UPDATE if parameters else op.phase

    def _task(
        self, name: str, reads: Iterable[int], writes: Iterable[int], kernel: Call, **more: Any
    ) -> int:
        writes = tuple(writes)
        self._written.update(writes)
        return self._graph.task(name, reads, writes, kernel=kernel, **more)

    def updates(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[tuple[int, torch.nn.Parameter]],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """One task for every parameter that got a gradient."""
        found = [
            (group, p, self._recorder.value(p), self._recorder.value(g))
            for (group, p), g in zip(parameters, gradients, strict=True)
            if g is not None
        ]
        # All of them before the first parameter changes: a gradient may lie in a parameter.
        ready = [(group, p, own, self._gradient(own, g)) for group, p, own, g in found]
        for group, p, own, g in ready:
            name = self._graph.buffers[own.buffer].name
            if not _is_whole(p):
                raise CaptureError(
                    f"{name} is a piece of a larger tensor, which an update of its own would tear."
                    " Give it memory of its own: nn.Parameter(p.detach().clone())"
                )
            update = update_of(optimizer, group, p)
            states = []
            for key in update.states:
                tensor = optimizer.state[p][key]
                # `load_state_dict` makes another tensor of it.
                live = partial(_state, optimizer, p, key)
                nbytes = tensor.untyped_storage().nbytes()
                home = _Home(f"optimizer.{key}.{name}", Role.STATE, nbytes, live)
                buffer = self._persistent(home)
                states.append(
                    Value(buffer, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()))
                )
            buffers = [v.buffer for v in states]
            self._task(
                f"{name}.update",
                (own.buffer, g.buffer, *buffers),
                (own.buffer, *buffers),
                Call(update, (own, g, *states)),
                phase=UPDATE,
                traffic=p.numel() * p.element_size() * (3 + 2 * len(states)),
            )
        self._after_step.append(advance(optimizer, [p for _, p, _, _ in ready]))

    def _gradient(self, own: Value, g: Value) -> Value:
        """Laid out as the parameter is, and not in a persistent buffer: eager's `.grad`."""
        buffer = self._graph.buffers[g.buffer]
        steps = [(a, b) for a, b, n in zip(own.stride, g.stride, g.size, strict=True) if n > 1]
        alike = all(a == b for a, b in steps) and g.dtype == own.dtype
        if alike and not buffer.persistent and buffer.role is not Role.INPUT:
            if buffer.role is Role.TEMPORARY:
                self._graph.buffers[g.buffer] = replace(buffer, role=Role.GRADIENT)
            return replace(g, stride=own.stride)
        name = f"{self._graph.buffers[own.buffer].name}.gradient"
        nbytes = self._graph.buffers[own.buffer].nbytes
        number = self._graph.buffer(name, nbytes, Role.GRADIENT)
        copy = replace(own, buffer=number)
        self._task(name, (g.buffer,), (number,), _copy(copy, g), phase="backward")
        return copy

    def finish(self, outputs: tuple[Any, ...], recapture: Callable[..., Any]) -> TaskGraph:
        """Name what goes in and what comes out."""
        values = pytree.tree_map_only(torch.Tensor, self._recorder.value, outputs)
        for leaf in pytree.tree_leaves(values, is_leaf=lambda leaf: isinstance(leaf, Value)):
            if isinstance(leaf, Value) and leaf.buffer not in self._graph.outputs:
                self._graph.output(leaf.buffer)
        self._graph.program = Program(
            tuple(self._recorder.inputs),
            values,
            self._tensors,
            recapture,
            tuple(self._after_step),
        )
        self._graph.check()
        return self._graph


def _copy(to: Value, source: Value) -> Call:
    return Call(torch.ops.aten.copy_.default, (to, source))


def _given(storage: Any) -> torch.Tensor:
    assert storage.tensor is not None
    return storage.tensor


def _literal(number: int, storage: Any) -> _Home:
    return _Home(f"literal.{number}", Role.CONSTANT, storage.nbytes, _given(storage))


def _state(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, key: str) -> torch.Tensor:
    return optimizer.state[p][key]


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether nothing else lies in its storage."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return span * tensor.element_size() == tensor.untyped_storage().nbytes()


def _activations(tape: Tape) -> set[int]:
    made = {b for op in tape.ops if op.phase == FORWARD for b in op.writes}
    return made & {b for op in tape.ops if op.phase != FORWARD for b in op.reads}
