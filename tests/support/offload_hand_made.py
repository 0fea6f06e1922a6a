"""Graphs made by hand for the runner's tests."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from support.stream_graphs import HandPlan as HandPlan
from support.stream_graphs import Kernel, chain

from offload.graph.taskgraph import TaskGraph
from offload.plans.plan import plan
from offload.program.kernels import Program, Value


def planned(graph: TaskGraph, budget: Any = None) -> Any:
    made = plan(graph, budget, placement="copy", recompute=False)
    made.verify()
    return made


def bytes_of(number: int, nbytes: int) -> Value:
    return Value(number, torch.uint8, (nbytes,), (1,))


def bind(graph: TaskGraph, inputs: Sequence[int] = (), **more: Any) -> TaskGraph:
    """The graph with a program over bytes."""
    program = Program(
        tuple(bytes_of(b, graph.buffers[b].nbytes) for b in inputs),
        tuple(bytes_of(b, graph.buffers[b].nbytes) for b in graph.outputs),
        {b.tensor: pattern(b.name, b.nbytes) for b in graph.buffers if b.persistent},
        **more,
    )
    return replace(graph, program=program)


def pattern(name: str, nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) * 7 + zlib.crc32(name.encode())).to(torch.uint8)


def mix(salt: int) -> Kernel:
    """What it writes depends on every byte that it reads and, of a buffer in both, on its own."""

    def kernel(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        seen = salt
        for read in reads:
            seen = zlib.crc32(read.numpy().tobytes(), seen)
        for number, written in enumerate(writes):
            written.copy_(pattern(str(seen + number), written.numel()))

    return kernel


def layers(count: int = 4, nbytes: int = 640) -> TaskGraph:
    """A chain so wide in its activations that half of the peak has to stream."""
    return chain(count, nbytes, nbytes, kernel=mix, workspace=100)


def plainly(graph: TaskGraph, inputs: Sequence[torch.Tensor], held: dict[str, torch.Tensor]) -> Any:
    """Program order on tensors of its own. Returns the outputs; `held` advances."""
    memory = {b: torch.zeros(x.nbytes, dtype=torch.uint8) for b, x in enumerate(graph.buffers)}
    for b, buffer in enumerate(graph.buffers):
        if buffer.persistent:
            memory[b] = held[buffer.tensor]
    for value, given in zip(graph.program.inputs, inputs, strict=True):
        memory[value.buffer] = given.clone()
    for task in graph.tasks:
        task.kernel([memory[b] for b in task.reads], [memory[b] for b in task.writes])
    return [memory[b].clone() for b in graph.outputs]
