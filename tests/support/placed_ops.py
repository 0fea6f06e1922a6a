"""One op on copies of given tensors, bound to planned addresses."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import ALIGNMENT, SMALL_WORKSPACE, Access, Node, Place
from offload.graph.taskgraph import TaskGraph
from offload.measuring.profiling import measure_tasks
from offload.memory import cpu_shim as shim
from offload.memory.placement import COPY, SHIM, PlacementCounts, Run, bind_task
from offload.program.kernels import Call, Value

PLACED = pytest.mark.skipif(shim.available() is None, reason=shim.why_not() or "there is one")
MODES = [COPY, pytest.param(SHIM, marks=PLACED)]


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def flatten_results(result: Any) -> list[Any]:
    return [result] if isinstance(result, torch.Tensor) else list(result or ())


class Rig:
    """A graph of calls on copies of given tensors; every buffer has a place of its own."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self.storages: dict[int, int] = {}
        self.begin: dict[int, torch.Tensor] = {}

    def value(self, tensor: torch.Tensor) -> Value:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            b = self.builder.buffer(f"b{len(self.storages)}", storage.nbytes(), "input")
            self.storages[storage._cdata] = b
            self.begin[b] = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
        return Value(
            self.storages[storage._cdata],
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def call(self, op: Any, args: Any, kwargs: Any) -> Call:
        """`op` runs right now: what it returns and changes is what the bound one must."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.value, (args, kwargs))
        mine = {v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Value)}
        views = {v: self.fresh(v) for v in mine}
        call = Call(op, args, kwargs)
        given, named = call.arguments(views.__getitem__)
        results = flatten_results(op(*given, **named))
        old = {v.untyped_storage().data_ptr() for v in views.values()}
        outputs: list[Value | None] = []
        for found in results:
            new = isinstance(found, torch.Tensor) and (
                found.untyped_storage().data_ptr() not in old and found.numel() > 0
            )
            outputs.append(self.output(found) if new else None)
        self.changed = views
        self.results = results
        self.outputs = outputs
        return replace(call, outputs=tuple(outputs))

    def fresh(self, value: Value) -> torch.Tensor:
        storage = self.shared.setdefault(value.buffer, self.begin[value.buffer].clone())
        empty = torch.empty(0, dtype=value.dtype)
        return empty.set_(storage.untyped_storage(), value.offset, value.size, value.stride)

    @property
    def shared(self) -> dict[int, torch.Tensor]:
        return self.__dict__.setdefault("_shared", {})

    def output(self, found: torch.Tensor) -> Value:
        storage = found.untyped_storage()
        b = self.builder.buffer(f"out{len(self.builder.buffers)}", storage.nbytes())
        return Value(
            b, found.dtype, tuple(found.size()), found.stride(), int(found.storage_offset())
        )


@dataclass
class Bound:
    """The graph's only task, on an arena of its own."""

    run: Run
    arena: torch.Tensor
    places: list[Place]
    bindings: PlacementCounts

    def view(self, value: Value) -> torch.Tensor:
        first = self.places[value.buffer].offset // value.dtype.itemsize + value.offset
        empty = torch.empty(0, dtype=value.dtype)
        return empty.set_(self.arena.untyped_storage(), first, value.size, value.stride)

    def fill(self, begin: dict[int, torch.Tensor]) -> None:
        for b, content in begin.items():
            place = self.places[b]
            self.arena[place.offset : place.offset + place.nbytes] = content


def bound(graph: TaskGraph, mode: str, *, workspace: bool = True) -> Bound:
    places, end = [], ALIGNMENT
    for buffer in graph.buffers:
        places.append(Place(0, end, buffer.nbytes))
        end += aligned(buffer.nbytes) + ALIGNMENT
    [task] = graph.tasks
    room = Place(0, end, task.workspace)
    arena = torch.full((end + aligned(task.workspace),), 255, dtype=torch.uint8)
    accesses = [Access(places[b], b, b in task.reads, b in task.writes) for b in task.touches]
    large = task.workspace > SMALL_WORKSPACE
    if large and workspace:
        accesses.append(Access(room, None, True, True))
    node = Node("task", "compute", tuple(accesses), (), task=0)
    scratch = room if task.workspace and not large else None
    bindings = PlacementCounts()
    run = bind_task(graph, node, {0: arena}, mode, scratch, bindings)
    return Bound(run, arena, places, bindings)


def rigged(op: Any, *args: Any, **kwargs: Any) -> tuple[Rig, TaskGraph]:
    rig = Rig()
    call = rig.call(op, args, kwargs)
    everything = range(len(rig.builder.buffers))
    rig.builder.task("it", everything, everything, kernel=call)
    return rig, measure_tasks(rig.builder.graph())


def t(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size).to(dtype)
