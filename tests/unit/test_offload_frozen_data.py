"""What is handed from one package to the next cannot be written; only a plan's remarks grow."""

from dataclasses import FrozenInstanceError, fields
from typing import Any, get_origin

import pytest
import torch

from offload import Costs, GraphBuilder, MemGraph, Plan, Runner, Simulation, TaskGraph, plan
from offload.graph.memgraph import Access, Block, Node, Place
from offload.graph.remarks import Remarks
from offload.graph.taskgraph import Buffer, Task
from offload.memory.arenas import HostArena
from offload.planning.wanted import FoundPlan
from offload.plans.plan import PlanningOptions
from offload.program.kernels import Call, Calls, Program, Value

HANDED_ON = [
    Access, Block, Buffer, Call, Calls, Costs, FoundPlan, MemGraph, Node, Place, Plan,
    PlanningOptions, Program, Simulation, Task, TaskGraph, Value,
]  # fmt: skip


def built() -> GraphBuilder:
    builder = GraphBuilder()
    x, y = builder.buffer("x", 64, "input"), builder.buffer("y", 64)
    builder.task("f", [x], [y], kernel=lambda reads, writes: writes[0].copy_(reads[0]))
    builder.output(y)
    return builder


@pytest.mark.parametrize("name", [field.name for field in fields(TaskGraph)])
def test_no_field_of_a_graph_can_be_written(name: str) -> None:
    graph = built().graph(notes=["a note"])
    before = getattr(graph, name)
    with pytest.raises(FrozenInstanceError):
        setattr(graph, name, before)
    if name != "program":
        with pytest.raises(AttributeError):
            before.append(None)
        with pytest.raises(TypeError):
            before[0] = None


@pytest.mark.parametrize("kind", HANDED_ON)
def test_what_is_handed_on_is_frozen_and_has_no_field_that_grows(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen
    assert not [field.name for field in fields(kind) if get_origin(field.type) in (list, dict, set)]


def test_a_graph_stays_as_it_is_while_its_builder_and_its_lists_grow() -> None:
    builder = built()
    first = builder.graph()
    builder.task("g", [0], [builder.buffer("z", 64)])
    assert (len(first.buffers), len(first.tasks)) == (2, 1)
    assert (len(builder.graph().buffers), len(builder.graph().tasks)) == (3, 2)
    tasks, buffers = list(first.tasks), list(first.buffers)
    made = first.with_tasks(tasks, buffers, "a note", "", "another")
    tasks.clear()
    buffers.clear()
    assert (made.tasks, made.buffers, made.outputs) == (first.tasks, first.buffers, first.outputs)
    assert made.notes == ("a note", "another") and first.notes == ()


def test_the_newest_remark_comes_first_and_none_twice() -> None:
    remarks = Remarks()
    assert [remarks.add(text) for text in ("one", "two", "one")] == [True, True, False]
    assert [*remarks] == ["two", "one"]


def test_a_run_adds_to_the_remarks_of_its_plan_and_to_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostArena, "note", "1 MiB of host memory could not be page-locked")
    made = plan(built().graph(notes=["what a pass did"]), placement="copy")
    before, nodes = made.graph.notes, made.memgraph.nodes
    with Runner(made, "serial") as runner:
        runner(torch.ones(64, dtype=torch.uint8))
    assert made.graph.notes is before and made.source.notes == ("what a pass did",)
    assert made.memgraph.nodes is nodes
    assert [*made.remarks] == ["1 MiB of host memory could not be page-locked"]
    text = made.explain()
    assert 0 < text.index("could not be page-locked") < text.index("what a pass did")


def test_two_plans_of_one_graph_have_remarks_of_their_own() -> None:
    graph = built().graph()
    one, other = plan(graph, placement="copy"), plan(graph, placement="copy")
    one.remarks.add("of the first")
    assert not [*other.remarks] and not [*one.replan(graph).remarks]
