"""Binds a task of the graph to the addresses that the plan gave it.

    Call(aten.mm, (x, w), outputs=(y,))   places x@0 w@64 y@128   --bind_task-->   run()

    shim   the allocator hands the planned addresses to the op, so it writes its outputs there
    copy   the op allocates as usual, and its outputs are copied there (needs no compiler)

Views and arguments are built once, and `run()` does as little in Python as possible. The first run
compares what the op returned with the plan. From then on an output that lies elsewhere is copied;
an output of another shape is an error. The bits are the same either way.

Call `run()` under `torch.no_grad()`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import GraphError
from offload.graph.memgraph import SMALL_WORKSPACE, Node, Place
from offload.graph.taskgraph import TaskGraph
from offload.memory.cuda_shim import available_on, load_on
from offload.program.generators import draw_elsewhere, generators_in
from offload.program.kernels import CPU, Call, Value
from offload.torch_seams import OpOverload, address_of

SHIM, COPY = "shim", "copy"
MODES = (SHIM, COPY)

Run = Callable[[], object]
Arenas = Mapping[int, torch.Tensor]
Targets = Sequence[tuple[int, torch.Tensor]]
"""Positions among the outputs, and the planned views of them."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of a call: an output, or hidden memory at `offset` of the task's workspace."""

    nbytes: int
    output: int | None = None
    """Position of the output."""
    offset: int | None = None
    """If `output` is None too, the memory stays where the allocator puts it."""


@dataclass(slots=True)
class PlacementCounts:
    """Counts what happened to outputs of the calls that ran at least once; one for a whole
    runner."""

    placed: int = 0
    """Outputs that the op itself wrote at the planned address."""
    copied: int = 0
    """Outputs that are copied there after every run."""
    missed: int = 0
    """Runs that allocated differently than recorded. Their outputs were copied where needed."""


def choose_placement(mode: str = "auto", device: torch.device = CPU) -> str:
    """The mode that `auto` stands for on a device. An error if the shim is asked for and
    missing."""
    if mode == "auto":
        return SHIM if available_on(device) else COPY
    if mode not in MODES:
        raise ValueError(f"placement {mode!r} is unknown; choose one of auto, {', '.join(MODES)}")
    if mode == SHIM:
        load_on(device)
    return mode


def bind_task(
    graph: TaskGraph,
    node: Node,
    arenas: Arenas,
    mode: str,
    scratch: Place | None = None,
    bindings: PlacementCounts | None = None,
) -> Run:
    """A function that runs the task.

    `arenas`: a 1-D uint8 tensor for each device and the host; `scratch`: a place for workspaces of
    up to `SMALL_WORKSPACE` bytes that have none of their own."""
    task = graph.tasks[node.task]
    places = {b: access.place for b, access in zip(task.touches, node.accesses, strict=False)}
    kernel = task.kernel
    if kernel is None:
        if task.writes:
            raise GraphError(f"task {task.name} writes buffers but has no kernel; give it one")
        return tuple  # does nothing
    if not hasattr(kernel, "calls"):
        return functools.partial(
            kernel,
            [_bytes(arenas, places[b]) for b in task.reads],
            [_bytes(arenas, places[b]) for b in task.writes],
        )
    workspace = scratch if task.workspace <= SMALL_WORKSPACE else None
    if len(node.accesses) > len(task.touches):
        workspace = node.accesses[-1].place
    for b, part in getattr(kernel, "inner", {}).items():
        assert workspace is not None, "the planner gave the task no workspace"
        places[b] = Place(workspace.arena, workspace.offset + part.start, len(part))
    device = _device(arenas, node)
    mode = choose_placement(mode, device)
    bindings = PlacementCounts() if bindings is None else bindings
    binder = _Binder(arenas, places, mode, workspace, bindings, device)
    calls = kernel.calls
    if device.type == "cuda" and task.device and (task.random or any(map(generators_in, calls))):
        first = torch.device(device.type, device.index - task.device)
        calls = draw_elsewhere(calls, first, device)
    runs = [binder.bind_call(call) for call in calls]
    if len(runs) == 1:
        return runs[0]
    chain = getattr(calls[0].op, "chain", None)
    return chain(runs) if chain is not None else functools.partial(_run_in_a_row, tuple(runs))


def _device(arenas: Arenas, node: Node) -> torch.device:
    """The device of a task's bytes; the CPU for tasks on the host."""
    return next((arenas[access.place.arena].device for access in node.accesses), CPU)


def _run_in_a_row(runs: tuple[Run, ...]) -> None:
    for run in runs:
        run()


def _bytes(arenas: Arenas, place: Place) -> torch.Tensor:
    return arenas[place.arena][place.offset : place.offset + place.nbytes]


@dataclass(frozen=True, slots=True)
class _Binder:
    """Binds the calls of one task."""

    arenas: Arenas
    places: Mapping[int, Place]
    mode: str
    workspace: Place | None
    bindings: PlacementCounts
    device: torch.device

    def bind_call(self, call: Call) -> Run:
        args, kwargs = call.arguments(self.view)
        args = tuple(map(self._here, args))
        kwargs = {name: self._here(arg) for name, arg in kwargs.items()}
        bind = getattr(call.op, "bind", None)
        run = bind(args, kwargs) if bind else functools.partial(call.op, *args, **kwargs)
        return self._serve(call, run)

    def _here(self, argument: Any) -> Any:
        """An argument of the call; of a device that it names, the one that the task runs on."""
        named = isinstance(argument, torch.device) and argument.type == self.device.type
        return self.device if named else argument

    def _serve(self, call: Call, run: Run) -> Run:
        """The run with the call's allocations at their planned addresses."""
        targets = tuple((n, self.view(v)) for n, v in enumerate(call.outputs) if v is not None)
        if self.mode == COPY or call.allocations is None:
            return _Copied(run, _OutputCopier(call, targets, self.bindings)) if targets else run
        if not call.allocations and not targets:
            return run
        slots = [(a.nbytes, self.address(call, a)) for a in call.allocations]
        settle = _OutputCopier(call, targets, self.bindings)
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
                f"buffer {value.buffer} has {place.nbytes} bytes at {first}, and a {value.dtype}"
                f" tensor of size {value.size}, stride {value.stride}, offset {value.offset} does"
                " not fit into it"
            )
        empty = torch.empty(0, dtype=value.dtype, device=arena.device)
        storage = arena.untyped_storage()
        return empty.set_(storage, first // item + value.offset, value.size, value.stride)

    def address(self, call: Call, allocation: Allocation) -> int:
        """The planned address of an allocation; 0 if it has none."""
        place, offset = self.workspace, allocation.offset
        if allocation.output is not None:
            value = call.outputs[allocation.output]
            place, offset = (self.places[value.buffer], 0) if value else (None, None)
        if place is None or offset is None or offset + allocation.nbytes > place.nbytes:
            return 0
        return address_of(self.arenas[place.arena]) + place.offset + offset


@dataclass(slots=True)
class _OutputCopier:
    """Copies outputs that lie elsewhere into the planned views. A call returns true as long as it
    has to see the next result, too."""

    call: Call
    targets: Targets
    bindings: PlacementCounts
    seen: bool = False
    copies: int = 0

    def __call__(self, result: Any) -> bool:
        results = flatten_results(result)
        if not self.seen:
            _check(self.call, results, self.targets)
        moved = [
            (results[n], view) for n, view in self.targets if not _is_in_place(results[n], view)
        ]
        self._count(len(moved))
        if self._has_overlap([output for output, _ in moved]):
            moved = [(output.clone(), view) for output, view in moved]
        for output, view in moved:
            view.copy_(output)
        return self.copies > 0

    def _has_overlap(self, moved: Sequence[torch.Tensor]) -> bool:
        """Whether an output lies where another one belongs, or on its own place in another
        order."""
        homes = {address_of(view) for _, view in self.targets}
        return any(address_of(output) in homes for output in moved)

    def _count(self, moved: int) -> None:
        if self.seen:
            self.bindings.missed += not self.copies  # the shim called it because of a mismatch
            return
        self.seen = True
        self.copies = moved
        self.bindings.copied += moved
        self.bindings.placed += len(self.targets) - moved


@dataclass(slots=True)
class _Copied:
    """A call whose outputs are copied into the planned views."""

    run: Run
    settle: _OutputCopier

    def __call__(self) -> None:
        if not self.settle.seen:
            self.settle(self.run())
            return
        results = flatten_results(self.run())
        for position, view in self.settle.targets:
            view.copy_(results[position])


def flatten_results(result: Any) -> Sequence[Any]:
    """What an op returned, as a flat sequence."""
    if isinstance(result, torch.Tensor):
        return (result,)
    if not isinstance(result, tuple | list):
        return ()
    if not any(isinstance(item, list) for item in result):
        return result
    return [leaf for item in result for leaf in (item if isinstance(item, list) else (item,))]


def op_name(op: Callable[..., Any]) -> str:
    """A readable name of an op, also of one that something wraps."""
    op = op if isinstance(op, OpOverload) else getattr(op, "op", op)
    return str(op) if isinstance(op, OpOverload) else type(op).__name__


def _is_in_place(output: torch.Tensor, view: torch.Tensor) -> bool:
    return address_of(output) == address_of(view) and output.stride() == view.stride()


def _check(call: Call, results: Sequence[Any], targets: Targets) -> None:
    """Raise if an output differs in dtype or size: `copy_` would convert or broadcast it."""
    for position, target in targets:
        result = results[position] if position < len(results) else None
        if not isinstance(result, torch.Tensor):
            actual = type(result).__name__
        elif result.size() != target.size() or result.dtype is not target.dtype:
            actual = f"{result.dtype} {tuple(result.size())}"
        else:
            continue
        raise GraphError(
            f"{op_name(call.op)}: output {position} is {actual}, but the plan has {target.dtype}"
            f" {tuple(target.size())}. Capture the step again"
        )
