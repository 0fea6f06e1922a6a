"""Jobs that share a stage, and what plain torch makes of each alone."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import stream_graphs as graphs

import offload
from offload.graph.taskgraph import TaskGraph
from offload.program.kernels import CPU
from offload.running.runner import Runner
from offload.running.stage import Stage

CUDA = torch.device("cuda")
DEVICES = {"serial": CPU, "threads": CPU, "cuda": CUDA, "cudagraph": CUDA}
"""Of each engine."""
ENGINES = tuple(
    pytest.param(engine, marks=pytest.mark.gpu) if device == CUDA else engine
    for engine, device in DEVICES.items()
)


def stage(engine: str) -> Stage:
    return Stage(DEVICES[engine], engine)


class Job:
    """A graph, the user's tensors, and what plain torch would have made of them."""

    def __init__(self, graph: TaskGraph, budget: int | None = None, **options: Any) -> None:
        self.graph = graph
        self.tensors: Mapping[str, torch.Tensor] = graph.program.tensors
        self.plain = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}
        self._plainly = graphs.Plainly(graph, self.plain)
        self.plan = planned(graph, budget, **options)
        self.batch = graphs.batch(seed=len(graph.tasks))

    @classmethod
    def chain(
        cls, count: int, wide: int, budget: int | None = None, engine: str = "serial"
    ) -> "Job":
        """A job for the device of an engine."""
        return cls(graphs.bound(graphs.chain(count, wide), DEVICES[engine]), budget)

    @classmethod
    def mixed(
        cls, count: int, wide: int, budget: int | None = None, engine: str = "serial"
    ) -> "Job":
        """Every other update runs on the host, so every other weight may be resident."""
        graph = graphs.chain(count, wide, host_updates=True)
        updates = {f"update{n}" for n in range(1, count, 2)}
        tasks = [
            replace(task, lane="compute") if task.name in updates else task for task in graph.tasks
        ]
        return cls(graphs.bound(graph.with_tasks(tasks), DEVICES[engine]), budget)

    def plainly(self) -> torch.Tensor:
        """One step by plain torch."""
        [expected] = self._plainly.step(self.batch)
        return expected

    def step(self, runner: Runner) -> None:
        expected = self.plainly()
        [found] = runner(self.batch)
        assert torch.equal(found.cpu(), expected)

    def restart(self) -> None:
        """From the values of now, after a step that failed half way."""
        for name, tensor in self.tensors.items():
            self.plain[name].copy_(tensor)

    def is_right(self) -> bool:
        return all(torch.equal(self.tensors[name].cpu(), self.plain[name]) for name in self.plain)


def planned(graph: TaskGraph, budget: int | None, **options: Any) -> offload.Plan:
    """`budget`: beside what a device's libraries keep."""
    if budget is not None:
        budget += offload.plan(graph).reserve
    return offload.plan(graph, budget, placement="copy", recompute=False, **options)


def on_device(runner: Runner, job: Job) -> list[str]:
    """The tensors that lie in the device's arena now."""
    arena = runner.stage.lender.arena
    assert arena is not None
    regions = arena.regions.values()
    return [
        name
        for name, tensor in job.tensors.items()
        if any(region.contains(tensor.data_ptr()) for region in regions)
    ]


def waiting(runner: Runner, job: Job) -> list[str]:
    """The tensors that lie in the runner's waiting place now."""
    place = runner._memory.waiting
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


class Held:
    """A job's plan in which the kernels of some nodes wait, or fail, when a test says so."""

    def __init__(
        self,
        job: Job,
        nodes: Sequence[int],
        begun: threading.Event | None = None,
        go_on: threading.Event | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._begun, self._go_on = begun, go_on
        memgraph = job.plan.memgraph
        held = {memgraph.nodes[node].task for node in nodes}
        tasks = [
            replace(task, kernel=partial(self._around, task.kernel)) if n in held else task
            for n, task in enumerate(memgraph.graph.tasks)
        ]
        changed = replace(memgraph, graph=replace(memgraph.graph, tasks=tuple(tasks)))
        self.plan = job.plan = replace(job.plan, found=replace(job.plan.found, memgraph=changed))

    def hold(self) -> None:
        """The next step's kernels wait for `go_on`, after `begun`."""
        assert self._begun and self._go_on
        self._begun.clear()
        self._go_on.clear()
        self._holds = True

    _holds = False

    def _around(self, kernel: Callable[..., None], reads: Any, writes: Any) -> None:
        if self._holds and self._begun and self._go_on:
            self._begun.set()
            assert self._go_on.wait(60)
        if self.error is not None:
            raise self.error
        kernel(reads, writes)
