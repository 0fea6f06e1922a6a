"""Graphs of torch kernels that run on any device, and what they must come to."""

import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import MemGraph
from offload.graph.remarks import Remarks
from offload.graph.taskgraph import TaskGraph
from offload.program.kernels import Program, Value

Bytes = Sequence[torch.Tensor]
Kernel = Callable[[Bytes, Bytes], None]


def mixed(salt: int) -> Kernel:
    """What it writes depends on all bytes that it reads, and on the last of each everywhere."""

    def kernel(reads: Bytes, writes: Bytes) -> None:
        seen = torch.full_like(writes[0], salt)
        for read in reads:
            n = min(read.numel(), seen.numel())
            seen[:n].mul_(3).add_(read[:n])
            seen.add_(read[-1])
        for number, written in enumerate(writes):
            n = min(written.numel(), seen.numel())
            torch.mul(seen[:n], 2 * number + 1, out=written[:n])
            written[n:].fill_(salt)

    return kernel


def chain(
    count: int = 4,
    wide: int = 4096,
    thin: int = 640,
    host_updates: bool = False,
    kernel: Callable[[int], Kernel] = mixed,
    workspace: int = 0,
) -> TaskGraph:
    """Forward and back through weights of `wide` bytes by way of activations of `thin` bytes, and
    an update of each weight: on the device, or on the host's copies."""
    builder = GraphBuilder()
    x = builder.buffer("x", thin, "input")
    weights = [builder.buffer(f"w{n}", wide, "parameter") for n in range(count)]
    states = [builder.buffer(f"m{n}", wide, "state") for n in range(count)]
    made = [x]
    for n, w in enumerate(weights):
        made.append(builder.buffer(f"a{n}", thin, "activation"))
        builder.task(f"forward{n}", [made[-2], w], made[-1:], kernel=kernel(n))
    loss = builder.buffer("loss", 64)
    builder.task("loss", made[-1:], [loss], kernel=kernel(100))
    builder.output(loss)
    g = builder.buffer("g", thin, "gradient")
    builder.task("start", [loss], [g], kernel=kernel(101), phase="backward")
    for n, w in reversed(list(enumerate(weights))):
        d = builder.buffer(f"d{n}", wide, "gradient")
        builder.task(
            f"weight{n}",
            [g, made[n]],
            [d],
            kernel=kernel(20 + n),
            phase="backward",
            workspace=workspace,
        )
        builder.task(f"backward{n}", [g, w], [g], kernel=kernel(50 + n), phase="backward")
        builder.task(
            f"update{n}",
            [d, w, states[n]],
            [w, states[n]],
            kernel=kernel(70 + n),
            phase="update",
            where=f"model.py:{n}",
            lane="host" if host_updates else "compute",
        )
    return builder.graph()


def bound(graph: TaskGraph, device: str | torch.device = "cpu") -> TaskGraph:
    """The graph with a program."""

    def value(number: int) -> Value:
        return Value(number, torch.uint8, (graph.buffers[number].nbytes,), (1,))

    tensors = {
        b.tensor: (torch.arange(b.nbytes) * 7 + n).to(torch.uint8).to(device)
        for n, b in enumerate(graph.buffers)
        if b.persistent
    }
    program = Program(
        inputs=tuple(value(n) for n, b in enumerate(graph.buffers) if b.role.value == "input"),
        outputs=tuple(value(number) for number in graph.outputs),
        tensors=tensors,
        device=torch.device(device),
    )
    return replace(graph, program=program)


@dataclass
class Plainly:
    """Program order, on the CPU, in memory of its own."""

    graph: TaskGraph
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def step(self, x: torch.Tensor) -> list[torch.Tensor]:
        memory: dict[int, torch.Tensor] = {}
        for n, buffer in enumerate(self.graph.buffers):
            memory[n] = torch.zeros(buffer.nbytes, dtype=torch.uint8)
            if buffer.persistent:
                memory[n] = self.held[buffer.tensor]
            elif buffer.role.value == "input":
                memory[n] = x.clone()
        for task in self.graph.tasks:
            task.kernel([memory[b] for b in task.reads], [memory[b] for b in task.writes])
        return [memory[b].clone() for b in self.graph.outputs]


@dataclass(frozen=True)
class HandPlan:
    """Nothing but its MemGraph."""

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


def batch(nbytes: int = 640, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class Struck(BaseException):
    """What the alarm clock raises, at any line of the caller."""


@contextmanager
def alarm() -> Iterator[Callable[[float, Callable[[], object]], bool]]:
    """Yields `strikes(seconds, call)`: whether `Struck`, so many seconds later, ended the call."""
    armed = False

    def strike(number: int, frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Struck

    def strikes(seconds: float, call: Callable[[], object]) -> bool:
        nonlocal armed
        struck = False
        # `Struck` would be lost in a collection: it calls Python code of the tests' own.
        gc.disable()
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
            armed = False
        except Struck:
            struck = True
        finally:
            armed = False
            gc.enable()
        return struck

    before = signal.signal(signal.SIGALRM, strike)
    try:
        yield strikes
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
