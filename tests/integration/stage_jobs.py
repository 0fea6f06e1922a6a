"""Jobs that share a stage, and what plain torch makes of each alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import stream_graphs as graphs
import torch

import offload
from benchmarks.twins.twin_graph import GraphTwin
from benchmarks.twins.twin_streams import Twin
from offload.graph.taskgraph import TaskGraph
from offload.program.kernels import CPU
from offload.running.runner import Runner
from offload.running.stage import Stage

STAGES: dict[str, Callable[[], Stage]] = {
    "serial": lambda: Stage(CPU, "serial"),
    "threads": lambda: Stage(CPU, "threads"),
    "cuda": lambda: Stage(CPU, "cuda", driver=Twin()),
    "cudagraph": lambda: Stage(CPU, "cudagraph", driver=GraphTwin()),
}


class Job:
    """A graph, the user's tensors, and what plain torch would have made of them."""

    def __init__(self, graph: TaskGraph, budget: int | None = None, **options: Any) -> None:
        self.graph = graph
        self.tensors: Mapping[str, torch.Tensor] = graph.program.tensors
        self.plain = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self._plainly = graphs.Plainly(graph, self.plain)
        self.plan = offload.plan(graph, budget, placement="copy", recompute=False, **options)
        self.batch = graphs.batch(seed=len(graph.tasks))

    @classmethod
    def chain(cls, count: int, wide: int, budget: int | None = None) -> "Job":
        return cls(graphs.bound(graphs.chain(count, wide)), budget)

    def step(self, runner: Runner) -> None:
        [expected] = self._plainly.step(self.batch)
        [found] = runner(self.batch)
        assert torch.equal(found, expected)

    def is_right(self) -> bool:
        return all(torch.equal(self.tensors[name], self.plain[name]) for name in self.plain)


def on_device(runner: Runner, job: Job) -> list[str]:
    """The tensors that lie in the device's arena now."""
    arena = runner._stage._arena
    assert arena is not None
    regions = arena.regions.values()
    return [
        name
        for name, tensor in job.tensors.items()
        if any(region.contains(tensor.data_ptr()) for region in regions)
    ]


def waiting(runner: Runner, job: Job) -> list[str]:
    """The tensors that lie in the runner's waiting place now."""
    place = runner._waiting
    assert place is not None
    return [name for name, tensor in job.tensors.items() if place.contains(tensor.data_ptr())]


def part(job: Job, count: int) -> TaskGraph:
    """A step over some of the job's tensors: a chain of the first `count` weights."""
    made = graphs.bound(graphs.chain(count, job.graph.buffers[1].nbytes))
    tensors = {name: job.tensors[name] for name in made.program.tensors}
    return replace(made, program=replace(made.program, tensors=tensors))


def part_of_plain(job: Job, count: int) -> None:
    """What `part` makes of the plain tensors."""
    graphs.Plainly(part(job, count), job.plain).step(job.batch)
