"""Any graph of kernels whose bits depend on all that they read, and a plain run of it.

The plain run (`expected`) knows no plan: one tensor a buffer, tasks in program order. Graphs have
several devices, host tasks, in-place writes, persistent buffers, empty ones and hidden workspaces.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import Role, TaskGraph
from offload.program.kernels import Program, Value

SIZES = (0, 1, 63, 64, 100, 640, 1000)
HELD_BEFORE = ("parameter", "state", "buffer", "constant", "input")


def mixing(task: int, changed: frozenset[int]) -> Callable[..., None]:
    """A kernel whose bits depend on every byte that it reads. `changed`: the writes that keep
    something of what was there."""

    def run(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        seen = hashlib.blake2b(bytes([task]), digest_size=4)
        for tensor in reads:
            seen.update(tensor.numpy().tobytes())
        salt = int.from_bytes(seen.digest(), "little")
        for number, tensor in enumerate(writes):
            fresh = (torch.arange(tensor.numel()) * (salt % 97 + 1) + salt + number).to(torch.uint8)
            tensor.copy_(tensor + fresh if number in changed else fresh)

    return run


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    builder, devices = GraphBuilder(), draw(st.integers(1, 3))
    alive: list[int] = []
    homes: dict[int, int] = {}
    """Of each persistent buffer, the device that changes it."""
    random_task: int | None = None
    for number in range(draw(st.integers(1, 7))):
        role = draw(st.sampled_from(HELD_BEFORE))
        alive.append(builder.buffer(f"p{number}", draw(st.sampled_from(SIZES)), role))
    for number in range(draw(st.integers(1, 24))):
        device, before = draw(st.integers(0, devices - 1)), list(alive)
        kind = draw(st.sampled_from(["compute"] * 8 + ["host"]))
        reads = draw(st.lists(st.sampled_from(alive), unique=True, max_size=3))
        writes = [
            builder.buffer(f"b{number}.{n}", draw(st.sampled_from(SIZES)), "activation")
            for n in range(draw(st.integers(0, 2)))
        ]
        alive += writes
        writable = [
            b for b in before
            if builder.buffers[b].role is not Role.CONSTANT
            and (kind == "host" or homes.get(b, device) == device)
        ]  # fmt: skip
        if writable and draw(st.booleans()):
            writes.append(changed := draw(st.sampled_from(writable)))
            if kind == "compute" and builder.buffers[changed].persistent:
                homes[changed] = device
            if draw(st.integers(0, 3)) and changed not in reads:
                reads.append(changed)
        after = () if random_task is None or draw(st.integers(0, 4)) else (random_task,)
        keeps = frozenset(n for n, b in enumerate(writes) if b in reads)
        made = builder.task(
            f"t{number}", reads, writes, lane=kind, device=device, after=after,
            workspace=draw(st.sampled_from([0, 0, 8, 70_000])) if kind == "compute" else 0,
            kernel=mixing(number, keeps),
        )  # fmt: skip
        random_task = made if after or random_task is None else random_task
    for output in draw(st.lists(st.sampled_from(alive), unique=True, max_size=3)):
        builder.output(output)
    return builder.graph()


@dataclass
class Step:
    """A graph, and what lies in the outside world."""

    graph: TaskGraph
    tensors: dict[str, torch.Tensor]
    batch: list[torch.Tensor]


def bound(graph: TaskGraph) -> Step:
    def whole(b: int) -> Value:
        return Value(b, torch.uint8, (graph.buffers[b].nbytes,), (1,))

    generator = torch.Generator().manual_seed(len(graph.tasks))
    contents = [
        torch.randint(0, 256, (buffer.nbytes,), dtype=torch.uint8, generator=generator)
        for buffer in graph.buffers
    ]
    inputs = [n for n, buffer in enumerate(graph.buffers) if buffer.role is Role.INPUT]
    tensors = {b.name: contents[n] for n, b in enumerate(graph.buffers) if b.persistent}
    outputs = tuple(whole(b) for b in graph.outputs)
    program = Program(tuple(whole(b) for b in inputs), outputs, tensors)
    return Step(replace(graph, program=program), tensors, [contents[n] for n in inputs])


def expected(step: Step, steps: int) -> tuple[dict[str, torch.Tensor], list[list[torch.Tensor]]]:
    graph = step.graph
    memory = [torch.zeros(buffer.nbytes, dtype=torch.uint8) for buffer in graph.buffers]
    for buffer, tensor in zip(graph.buffers, memory, strict=True):
        if buffer.persistent:
            tensor.copy_(step.tensors[buffer.name])
    returned = []
    for _ in range(steps):
        given = iter(step.batch)
        for buffer, tensor in zip(graph.buffers, memory, strict=True):
            if buffer.role is Role.INPUT:
                tensor.copy_(next(given))
        for task in graph.tasks:
            task.kernel([memory[b] for b in task.reads], [memory[b] for b in task.writes])
        returned.append([memory[b].clone() for b in graph.outputs])
    return {b.name: t for b, t in zip(graph.buffers, memory, strict=True) if b.persistent}, returned
