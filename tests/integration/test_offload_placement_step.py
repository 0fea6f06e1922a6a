"""A whole captured step, every buffer at a place of its own, no planner: the plain step's bits."""

import copy
from typing import Any

import pytest
import torch

from offload.graph.memgraph import ALIGNMENT, Access, Node, Place
from offload.graph.taskgraph import TaskGraph
from offload.measuring.profiling import measured
from offload.memory import cpu_shim as shim
from offload.memory.placement import COPY, SHIM, Bindings, Run, bind_task
from offload.program.kernels import Value
from offload.tracing.capture import traced_training_step as capture_training_step

PLACED = pytest.mark.skipif(shim.available() is None, reason=shim.why_not() or "there is one")
MODES = [COPY, pytest.param(SHIM, marks=PLACED)]


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.query = torch.nn.Linear(4, 12)
        self.drop = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(x)).relu().flatten(2).transpose(1, 2)
        q, k, v = self.query(x).chunk(3, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(self.drop(attended).mean(1))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class Step:
    """All tasks, in the program's order."""

    def __init__(self, graph: TaskGraph, mode: str) -> None:
        self.graph = graph
        self.begins: list[int] = []
        end = 0
        for buffer in graph.buffers:
            self.begins.append(end)
            end += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        room = max(task.workspace for task in graph.tasks)
        self.arena = torch.full((end + room,), 255, dtype=torch.uint8)
        self.bindings = Bindings()
        self.runs: list[Run] = []
        for number, task in enumerate(graph.tasks):
            accesses = [Access(self.place(b), b, True, True) for b in task.touches]
            if task.workspace:
                accesses.append(Access(Place(0, end, task.workspace), None, True, True))
            node = Node("task", "compute", tuple(accesses), (), task=number)
            arenas = {0: self.arena}
            self.runs.append(bind_task(graph, node, arenas, mode, None, self.bindings))

    def place(self, b: int) -> Place:
        return Place(0, self.begins[b], self.graph.buffers[b].nbytes)

    def bytes(self, b: int) -> torch.Tensor:
        return self.arena[self.begins[b] :][: self.graph.buffers[b].nbytes]

    def home(self, b: int, tensor: torch.Tensor) -> torch.Tensor:
        """Of the user's tensor the bytes that are this buffer's."""
        return bytes_of(tensor)[self.graph.buffers[b].start :][: self.graph.buffers[b].nbytes]

    def view(self, value: Value) -> torch.Tensor:
        first = self.begins[value.buffer] // value.dtype.itemsize + value.offset
        empty = torch.empty(0, dtype=value.dtype)
        return empty.set_(self.arena.untyped_storage(), first, value.size, value.stride)

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        program = self.graph.program
        with torch.no_grad():
            for value, tensor in zip(program.inputs, batch, strict=True):
                self.view(value).copy_(tensor)
            for run in self.runs:
                run()
        for after in program.after_step:
            after()
        return self.view(next(v for v in program.outputs if isinstance(v, Value)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_captured_step_has_the_bits_of_the_plain_one(kind: Any, mode: str) -> None:
    torch.manual_seed(0)
    model = Small()
    eager = copy.deepcopy(model)
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
    its = kind(eager.parameters(), lr=0.01, weight_decay=0.1)
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    loss_of = torch.nn.functional.cross_entropy
    step = Step(measured(capture_training_step(model, loss_of, optimizer, x, y)), mode)
    persistent = [b for b, buffer in enumerate(step.graph.buffers) if buffer.persistent]
    for b in persistent:
        source = step.graph.program.tensors[step.graph.buffers[b].tensor]
        tensor = source() if callable(source) else source
        step.bytes(b).copy_(step.home(b, tensor))

    for number in range(3):
        torch.manual_seed(number)
        expected = loss_of(eager(x), y)
        expected.backward()
        its.step()
        its.zero_grad()
        torch.manual_seed(number)
        assert torch.equal(step(x, y), expected)
    parameters = dict(eager.named_parameters())
    compared = [b for b in persistent if step.graph.buffers[b].tensor in parameters]
    assert len(compared) == len(parameters)
    for b in compared:
        tensor = parameters[step.graph.buffers[b].tensor].detach()
        assert torch.equal(step.bytes(b), step.home(b, tensor))
    assert step.bindings.missed == 0
    assert (step.bindings.placed, step.bindings.copied)[mode == SHIM] == 0


@PLACED
def test_a_step_at_planned_addresses_allocates_nothing_outside() -> None:
    model = Small()
    batch = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of = torch.nn.functional.cross_entropy
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # workers of an op allocate for themselves
    try:
        step = Step(measured(capture_training_step(model, loss_of, optimizer, *batch)), SHIM)
        step.arena.fill_(0)
        step(*batch)
        with shim.load().counting() as passed:
            for run in step.runs:
                run()
            assert (passed.allocations, passed.peak) == (0, 0)
    finally:
        torch.set_num_threads(before)
