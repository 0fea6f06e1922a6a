"""Draws of several devices: each has its place, and follows only the first one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.errors import StepError
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import TaskGraph
from offload.lowering.free_draws import free_draws
from offload.program import generators
from offload.program.generators import StepDraws
from offload.program.kernels import Call, Calls, Program

CUDA = torch.device("cuda", 0)


class Philox:
    """A generator that can begin anywhere in its sequence."""

    def __init__(self) -> None:
        self.state = 7, 100

    def initial_seed(self) -> int:
        return self.state[0]

    def get_offset(self) -> int:
        return self.state[1]

    def manual_seed(self, seed: int) -> "Philox":
        self.state = seed, 0
        return self

    def set_offset(self, offset: int) -> "Philox":
        self.state = self.state[0], offset
        return self


def drawing(*advances: int | None, device: torch.device = CUDA) -> TaskGraph:
    """A chain of draws, and a task that follows the last one."""
    builder = GraphBuilder()
    before: tuple[int, ...] = ()
    for number, advance in enumerate(advances):
        b = builder.buffer(f"b{number}", 64)
        kernel = Call(print, (), {}, (), advance=advance)
        before = (
            builder.task(f"t{number}", [], [b], kernel=kernel, random=True, after=before),
        )  # fmt: skip
        builder.output(b)
    builder.task("reads", [0], [builder.buffer("last", 64)], kernel=Call(print), after=before)
    return replace(builder.graph(), program=Program((), (), {}, device=device))


def places_of(graph: TaskGraph) -> list[tuple[int, int]]:
    """Where each task's draws begin and end."""
    made = [task.kernel.calls for task in graph.tasks if task.random]
    return [(calls[-3].args[0], calls[-1].args[0]) for calls in made]


def test_every_draw_has_its_place_and_follows_only_the_first() -> None:
    graph = drawing(8, 0, 4, 12)
    made = free_draws(graph)
    assert places_of(made) == [(0, 8), (8, 8), (8, 12), (12, 24)]
    assert [task.after for task in made.tasks] == [(), (0,), (0,), (0,), (3,)]
    assert made.tasks[0].kernel.calls[0].op.__func__ is StepDraws.begin
    assert made.tasks[0].kernel.calls[0].op.__self__.total == 24
    assert free_draws(made) is made, "it was done before"


@pytest.mark.parametrize("advances", [(8, None, 4), (None,)])
def test_draws_of_unknown_length_stay_in_a_row(advances: tuple[int | None, ...]) -> None:
    graph = drawing(*advances)
    made = free_draws(graph)
    assert made.tasks == graph.tasks
    name = f"t{advances.index(None)}"
    assert made.notes[-1].startswith(f"draws wait for each other, because {name} may draw")


def test_a_kernel_whose_numbers_vary_may_draw_more_in_another_step() -> None:
    graph = drawing(8, 8)
    op: Any = SimpleNamespace(varying=(1,))
    tasks = [replace(graph.tasks[0], kernel=Calls((Call(op, advance=8),))), *graph.tasks[1:]]
    assert free_draws(graph.with_tasks(tasks)).tasks == tuple(tasks)


def test_the_generator_of_a_cpu_cannot_begin_anywhere() -> None:
    graph = drawing(8, 8, device=torch.device("cpu"))
    assert free_draws(graph).tasks == graph.tasks


def test_the_generators_are_as_after_eager_and_a_wrong_length_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {n: Philox() for n in range(2)}
    monkeypatch.setattr(generators, "default_generator", lambda device: known[device.index])
    known[1].state = 5, 40
    draws: Any = StepDraws(CUDA, total=12)
    draws.begin(known[0])
    assert known[0].state == (7, 112)
    for number in (1, 0):
        device = torch.device("cuda", number)
        draws.enter(4, device)
        assert known[number].state == (7, 104)
        known[number].set_offset(108)
        draws.leave(8, device)
    draws.enter(8, torch.device("cuda", 1))
    known[1].set_offset(116)
    with pytest.raises(StepError, match=r"on cuda:1 moved .* to 16 .* 12 was found .* devices=1"):
        draws.leave(12, torch.device("cuda", 1))
    assert [known[0].state, known[1].state] == [(7, 112), (5, 40)]


def test_lanes_with_a_generator_each_draw_one_after_the_other_on_cpus() -> None:
    builder = GraphBuilder()
    for number in range(4):
        b = builder.buffer(f"b{number}", 64)
        builder.task(
            f"t{number}", [], [b], kernel=Call(print), random=True, device=number % 2, turn=number
        )
        builder.output(b)
    graph = replace(builder.graph(), program=Program((), (), {}, device=torch.device("cpu")))
    assert [task.after for task in free_draws(graph).tasks] == [(), (0,), (1,), (2,)]


def test_lanes_that_seed_draw_one_after_the_other_on_gpus_too() -> None:
    chained = drawing(8, None, 8)
    alone = chained.with_tasks([replace(task, after=()) for task in chained.tasks])
    assert [task.after for task in free_draws(alone).tasks if task.random] == [(), (0,), (1,)]
