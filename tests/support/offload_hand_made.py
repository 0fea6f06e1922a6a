"""Graphs made by hand for the runner's tests, and a plan that is nothing but its MemGraph."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import MemGraph
from offload.graph.remarks import Remarks
from offload.graph.taskgraph import TaskGraph
from offload.plans.plan import plan
from offload.program.kernels import Program, Value

Kernel = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


@dataclass(frozen=True)
class HandPlan:
    memgraph: MemGraph
    placement: str = "copy"
    replans: Callable[[TaskGraph], Any] | None = None
    costs: Costs = field(default_factory=Costs)
    reserve: int = 0
    remarks: Remarks = field(default_factory=Remarks)

    def explain(self) -> str:
        return "made by hand"

    @property
    def graph(self) -> TaskGraph:
        return self.memgraph.graph

    def replan(self, graph: TaskGraph) -> Any:
        assert self.replans is not None
        return self.replans(graph)


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
    """Forward through `count` weights, back through the activations, an update of each weight and
    its state: so much of it that half of the peak has to stream."""
    builder = GraphBuilder()
    x = builder.buffer("x", nbytes, "input")
    weights = [builder.buffer(f"w{n}", nbytes, "parameter") for n in range(count)]
    states = [builder.buffer(f"m{n}", nbytes, "state") for n in range(count)]
    made = [x]
    for n, w in enumerate(weights):
        made.append(builder.buffer(f"a{n}", nbytes, "activation"))
        builder.task(f"forward{n}", [made[-2], w], made[-1:], kernel=mix(n))
    loss = builder.buffer("loss", 64)
    builder.task("loss", made[-1:], [loss], kernel=mix(100))
    builder.output(loss)
    g = builder.buffer("g", nbytes, "gradient")
    builder.task("start", [loss], [g], kernel=mix(101), phase="backward")
    for n, w in reversed(list(enumerate(weights))):
        d = builder.buffer(f"d{n}", nbytes, "gradient")
        builder.task(
            f"weight{n}", [g, made[n]], [d], kernel=mix(200 + n), phase="backward", workspace=100
        )
        builder.task(f"backward{n}", [g, w], [g], kernel=mix(300 + n), phase="backward")
        builder.task(
            f"update{n}",
            [d, w, states[n]],
            [w, states[n]],
            kernel=mix(400 + n),
            phase="update",
            where=f"model.py:{n}",
        )
    return builder.graph()


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


def without_edge(memgraph: MemGraph, node: int, dep: int) -> MemGraph:
    nodes = list(memgraph.nodes)
    nodes[node] = replace(nodes[node], deps=tuple(d for d in nodes[node].deps if d != dep))
    return replace(memgraph, nodes=tuple(nodes))
