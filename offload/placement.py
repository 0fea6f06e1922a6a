"""A task of the graph, bound to the addresses that the plan gave it.

    Call(aten.mm, (x, w), outputs=(y,))   places x@0 w@64 y@128   --bind_task-->   run()

    shim   the allocator hands the planned addresses to the op: its outputs are born there
    copy   the op allocates as ever, and what it returns is copied there (needs no compiler)

Views and arguments are built once; `run()` does as little in Python as can be. What an op returned
is compared with the plan at its first run: an output that is elsewhere is copied from then on, one
of another shape is an error. The same bits either way.

`run()` expects to be called under `torch.no_grad()`.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.cuda_shim import available_on, load_on
from offload.errors import GraphError
from offload.joined import joined
from offload.kernels import CPU, Call, Value
from offload.memgraph import SMALL_WORKSPACE, Node, Place
from offload.scalars import Scalars
from offload.taskgraph import Task, TaskGraph

SHIM, COPY = "shim", "copy"
MODES = (SHIM, COPY)

Run = Callable[[], object]
Arenas = Mapping[int, torch.Tensor]
Targets = Sequence[tuple[int, torch.Tensor]]
"""Position among the outputs, and the view that it is to be."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One that a call makes: of an output, or hidden, at `offset` of the task's workspace."""

    nbytes: int
    output: int | None = None
    """By position."""
    offset: int | None = None
    """Both None: it stays where the allocator puts it."""


@dataclass(slots=True)
class Bindings:
    """What became of the outputs of the calls that ran at least once: one for a whole runner."""

    placed: int = 0
    """Written by the op itself at the planned address."""
    copied: int = 0
    """Copied there afterwards, at every run."""
    missed: int = 0
    """Runs that did not allocate as recorded; what they returned was copied where needed."""
    twins: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What `fast` found, by op and kinds of arguments."""


def chosen(mode: str = "auto", device: torch.device = CPU) -> str:
    """The mode that `auto` stands for there. Forcing the shim where there is none is an error."""
    if mode == "auto":
        return SHIM if available_on(device) else COPY
    if mode not in MODES:
        raise ValueError(f"placement {mode!r}: one of auto, {', '.join(MODES)} is needed")
    if mode == SHIM:
        load_on(device)
    return mode


def bind_task(
    graph: TaskGraph,
    node: Node,
    arenas: Arenas,
    mode: str,
    scratch: Place | None = None,
    bindings: Bindings | None = None,
    scalars: Scalars | None = None,
) -> Run:
    """What runs the task. `arenas`: a 1-D uint8 tensor for each device and the host; `scratch`:
    for a workspace of up to `SMALL_WORKSPACE` bytes that has no place of its own; `scalars`: the
    numbers that updates on the device read from memory."""
    task = graph.tasks[node.task]
    places = {b: access.place for b, access in zip(task.touches, node.accesses, strict=False)}
    kernel = task.kernel
    if kernel is None:
        return _without_kernel(task, places, arenas)
    if not hasattr(kernel, "calls"):
        return functools.partial(
            kernel,
            [_bytes(arenas, places[b]) for b in task.reads],
            [_bytes(arenas, places[b]) for b in task.writes],
        )
    workspace = scratch if task.workspace <= SMALL_WORKSPACE else None
    if len(node.accesses) > len(task.touches):
        workspace = node.accesses[-1].place
    device = _device(arenas, node)
    mode = chosen(mode, device)
    bindings = Bindings() if bindings is None else bindings
    binder = _Binder(arenas, places, mode, workspace, bindings, device)
    calls = kernel.calls
    if scalars is not None and task.engine != "host":
        calls = [scalars.bound(call) for call in calls]
    runs = [binder.served(call, run) for call, run in joined(calls, binder.view)]
    runs = runs or [binder.bound(call) for call in calls]
    return runs[0] if len(runs) == 1 else functools.partial(_in_a_row, tuple(runs))


def _device(arenas: Arenas, node: Node) -> torch.device:
    """Where a task's bytes are: of one on the host, in the machine's memory."""
    return next((arenas[access.place.arena].device for access in node.accesses), CPU)


def _in_a_row(runs: tuple[Run, ...]) -> None:
    for run in runs:
        run()


def _without_kernel(task: Task, places: Mapping[int, Place], arenas: Arenas) -> Run:
    """One that moves a buffer to another device is a copy; one that writes nothing is a mark in the
    order."""
    if task.engine == "d2d" and len(task.reads) == len(task.writes) == 1:
        target = _bytes(arenas, places[task.writes[0]])
        return functools.partial(target.copy_, _bytes(arenas, places[task.reads[0]]))
    if task.writes:
        raise GraphError(f"task {task.name} writes and has no kernel: give it one to run it")
    return tuple  # nothing to do


def _bytes(arenas: Arenas, place: Place) -> torch.Tensor:
    return arenas[place.arena][place.offset : place.offset + place.nbytes]


@dataclass(frozen=True, slots=True)
class _Binder:
    """The calls of one task."""

    arenas: Arenas
    places: Mapping[int, Place]
    mode: str
    workspace: Place | None
    bindings: Bindings
    device: torch.device

    def bound(self, call: Call) -> Run:
        args, kwargs = call.arguments(self.view)
        op = fast(call.op, args, kwargs, self.bindings.twins)
        return self.served(call, functools.partial(op, *args, **kwargs))

    def served(self, call: Call, run: Run) -> Run:
        """With what it allocates at its planned addresses."""
        targets = tuple((n, self.view(v)) for n, v in enumerate(call.outputs) if v is not None)
        if self.mode == COPY or call.allocations is None:
            return _Copied(run, _Settle(call, targets, self.bindings)) if targets else run
        if not call.allocations and not targets:
            return run
        slots = [(a.nbytes, self.address(call, a)) for a in call.allocations]
        settle = _Settle(call, targets, self.bindings)
        return load_on(self.device).bind(run, slots, settle, self.device.index or 0)

    def view(self, value: Value) -> torch.Tensor:
        """The value's tensor in its arena."""
        place = self.places[value.buffer]
        arena = self.arenas[place.arena]
        item = value.dtype.itemsize
        first = arena.storage_offset() + place.offset
        steps = zip(value.size, value.stride, strict=True)
        end = value.offset + 1 + sum((n - 1) * step for n, step in steps)
        if first % item or (0 not in value.size and end * item > place.nbytes):
            raise GraphError(
                f"buffer {value.buffer} has {place.nbytes} bytes at {first}; a {value.dtype} tensor"
                f" of size {value.size}, stride {value.stride}, offset {value.offset} does not fit"
            )
        empty = torch.empty(0, dtype=value.dtype, device=arena.device)
        storage = arena.untyped_storage()
        return empty.set_(storage, first // item + value.offset, value.size, value.stride)

    def address(self, call: Call, allocation: Allocation) -> int:
        """Where it is to lie; 0: nowhere in particular."""
        place, offset = self.workspace, allocation.offset
        if allocation.output is not None:
            value = call.outputs[allocation.output]
            place, offset = (self.places[value.buffer], 0) if value else (None, None)
        if place is None or offset is None or offset + allocation.nbytes > place.nbytes:
            return 0
        return self.arenas[place.arena].data_ptr() + place.offset + offset


@dataclass(slots=True)
class _Settle:
    """Sees what a call returned; true as long as it wants to see it again."""

    call: Call
    targets: Targets
    bindings: Bindings
    seen: bool = False
    copies: int = 0

    def __call__(self, result: Any) -> bool:
        results = flat(result)
        if not self.seen:
            _check(self.call, results, self.targets)
        moved = [(results[n], view) for n, view in self.targets if not _is(results[n], view)]
        self._count(len(moved))
        if self._mixed_up([found for found, _ in moved]):
            moved = [(found.clone(), view) for found, view in moved]
        for found, view in moved:
            view.copy_(found)
        return self.copies > 0

    def _mixed_up(self, moved: Sequence[torch.Tensor]) -> bool:
        """One lies where another, or itself in another order, belongs."""
        homes = {view.data_ptr() for _, view in self.targets}
        return any(found.data_ptr() in homes for found in moved)

    def _count(self, moved: int) -> None:
        if self.seen:
            self.bindings.missed += not self.copies  # called though it did not ask to be
            return
        self.seen = True
        self.copies = moved
        self.bindings.copied += moved
        self.bindings.placed += len(self.targets) - moved


@dataclass(slots=True)
class _Copied:
    """A call whose outputs are copied into the planned views."""

    run: Run
    settle: _Settle

    def __call__(self) -> None:
        if not self.settle.seen:
            self.settle(self.run())
            return
        results = flat(self.run())
        for position, view in self.settle.targets:
            view.copy_(results[position])


def flat(result: Any) -> Sequence[Any]:
    """What an op returned, by position."""
    if isinstance(result, torch.Tensor):
        return (result,)
    if not isinstance(result, tuple | list):
        return ()
    if not any(isinstance(item, list) for item in result):
        return result
    return [leaf for item in result for leaf in (item if isinstance(item, list) else (item,))]


def name(op: Callable[..., Any]) -> str:
    """For people."""
    return str(op) if isinstance(op, torch._ops.OpOverload) else type(op).__name__


def _is(found: torch.Tensor, view: torch.Tensor) -> bool:
    return found.data_ptr() == view.data_ptr() and found.stride() == view.stride()


def _check(call: Call, results: Sequence[Any], targets: Targets) -> None:
    """`copy_` would broadcast and convert what it must not."""
    for position, target in targets:
        found = results[position] if position < len(results) else None
        if not isinstance(found, torch.Tensor):
            got = type(found).__name__
        elif found.size() != target.size() or found.dtype is not target.dtype:
            got = f"{found.dtype} {tuple(found.size())}"
        else:
            continue
        raise GraphError(
            f"{name(call.op)}: output {position} is {got}, planned was {target.dtype}"
            f" {tuple(target.size())}"
        )


def fast(
    op: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: dict[Any, Any],
) -> Callable[..., Any]:
    """The cheapest callable that is the same op: `torch.mm` for `aten.mm.default`.

    Python's bindings cost half of what an `OpOverload` does, but choose the overload themselves:
    taken only if they choose this one, with these arguments."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return op
    key = (op, _kinds(args), _kinds(kwargs))
    if key not in known:
        known[key] = next(_twins(op, args, kwargs), op)
    return known[key]


def _twins(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    wanted = _dispatched(op, args, kwargs)
    for home in (torch, torch.nn.functional, torch.Tensor):
        found = getattr(home, op._opname, None)
        builtin = isinstance(found, types.BuiltinFunctionType | types.MethodDescriptorType)
        if builtin and wanted and _same(_dispatched(found, args, kwargs), wanted):
            yield found


def _kinds(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return tuple((key, _kinds(leaf)) for key, leaf in tree.items())
    return tuple(map(_kinds, tree)) if isinstance(tree, tuple | list) else type(tree)


class _Asked(Exception):
    """Ends a dispatch before anything is computed."""


class _Ask(TorchDispatchMode):
    """Sees which op a call would be."""

    seen: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = (func, args, kwargs or {})
        raise _Asked


def _dispatched(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """(op, args, kwargs) that a call comes down to; None where it does not get that far."""
    ask = _Ask()
    try:
        with ask:
            function(*args, **kwargs)
    except (_Asked, TypeError, ValueError, IndexError, RuntimeError):
        return ask.seen
    return None


def _same(a: Any, b: Any) -> bool:
    """Tensors by identity, everything else by type and value."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b
