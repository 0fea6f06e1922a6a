"""Which tasks become one region. What a region computes: tests/integration."""

from typing import Any

import pytest
import torch

from offload.errors import GraphError
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import Role, TaskGraph
from offload.lowering.compiled_regions import Fused, Region
from offload.lowering.fusion import fused
from offload.lowering.passes import lower
from offload.program.kernels import Call, Value

aten = torch.ops.aten
N = 16


class Graph:
    """Calls on vectors of N floats, in a row."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self.regions: list[Region] = []

    @property
    def graph(self) -> TaskGraph:
        return self.builder.graph()

    def value(self, name: str, role: Role = Role.TEMPORARY) -> Value:
        return Value(self.builder.buffer(name, 4 * N, role), torch.float32, (N,), (1,))

    def call(self, op: Any, *args: Any, name: str = "", **more: Any) -> Value:
        made = self.value(f"out of {len(self.builder.tasks)}")
        reads = dict.fromkeys(a.buffer for a in args if isinstance(a, Value))
        pointwise = torch.Tag.pointwise in op.tags
        kernel = Call(op, args, {}, (made,))
        self.builder.task(
            name or f"t{len(self.builder.tasks)}", reads, (made.buffer,), kernel=kernel,
            pointwise=pointwise, flops=1.0, repeatable=True, **more,
        )  # fmt: skip
        return made

    def fused(self) -> TaskGraph:
        def compile(region: Region, device: torch.device) -> Fused:
            self.regions.append(region)
            return Fused(lambda *tensors: tensors, ())

        made = fused(self.graph, compile, iter([0.0, 2.5]).__next__)
        made.check()
        return made


def names(graph: TaskGraph) -> list[str]:
    return [task.name for task in graph.tasks]


def test_a_chain_is_one_task_and_what_it_hands_on_is_in_no_plan() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    a = g.call(aten.mul.Tensor, x, 2.0)
    b = g.call(aten.add.Tensor, a, x)
    c = g.call(aten.tanh.default, b)
    g.builder.output(c.buffer)
    [task] = g.fused().tasks
    assert (task.name, task.reads, task.writes) == ("t0*3", (x.buffer,), (c.buffer,))
    assert (task.flops, task.traffic, task.repeatable) == (3, 2 * 4 * N, True)
    [region] = g.regions
    assert (len(region.calls), len(region.inputs), len(region.outputs)) == (3, 1, 1)


def test_what_is_read_elsewhere_is_an_output_of_its_region() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    a = g.call(aten.mul.Tensor, x, 2.0)
    b = g.call(aten.tanh.default, a)
    c = g.call(aten.dot.default, a, b)
    g.builder.output(c.buffer)
    found = g.fused()
    assert names(found) == ["t0*2", "t2"]
    assert found.tasks[0].writes == (a.buffer, b.buffer)


def test_neighbours_that_have_nothing_to_do_with_each_other_are_apart() -> None:
    g = Graph()
    x, y = g.value("x", Role.INPUT), g.value("y", Role.INPUT)
    a, b = g.call(aten.tanh.default, x), g.call(aten.tanh.default, y)
    a, b = g.call(aten.relu.default, a), g.call(aten.relu.default, b)
    for value in (a, b):
        g.builder.output(value.buffer)
    assert names(g.fused()) == ["t0*2", "t1*2"]
    assert g.graph.tasks[0].name == "t0"


def test_a_task_that_joins_two_chains_makes_them_one() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    a, b = g.call(aten.tanh.default, x), g.call(aten.relu.default, x)
    g.builder.output(g.call(aten.add.Tensor, a, b).buffer)
    assert names(g.fused()) == ["t0*3"]


def test_equal_regions_are_compiled_once_and_the_note_says_how_long_that_took() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    for _ in range(3):
        x = g.call(aten.relu.default, g.call(aten.tanh.default, x))
        x = g.call(aten.cumsum.default, x, 0)
    g.builder.output(x.buffer)
    found = g.fused()
    assert len(found.tasks) == 6
    assert len(g.regions) == 1
    assert found.notes == (
        "fused: 6 tasks are 3 compiled regions (1 different, 2.5 s to compile); the last bits"
        " differ",
    )


def test_numbers_that_differ_are_different_regions() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    for number in (1, 1.0):
        x = g.call(aten.tanh.default, g.call(aten.add.Tensor, x, number))
        x = g.call(aten.cumsum.default, x, 0)
    g.builder.output(x.buffer)
    g.fused()
    assert len(g.regions) == 2


def test_a_write_in_place_a_draw_and_an_update_are_in_no_region() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    a = g.call(aten.tanh.default, x)
    g.builder.task("in place", (a.buffer,), (a.buffer,), kernel=Call(aten.relu_.default, (a,)))
    b = g.call(aten.relu.default, a)
    c = g.call(aten.rand_like.default, b)
    d = g.call(aten.add.Tensor, b, c, phase="update")
    e = g.call(aten.tanh.default, d, phase="update")
    g.builder.output(e.buffer)
    assert len(g.fused().tasks) == len(g.graph.tasks)
    assert not g.regions
    assert g.fused().notes == ("fused: the graph has no two neighbouring small kernels",)


def test_who_reads_a_part_of_a_result_is_not_in_its_region() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    a = g.call(aten.tanh.default, g.call(aten.relu.default, x))
    whole = Value(a.buffer, torch.float32, (4, 4), (4, 1))
    turned = Value(a.buffer, torch.float32, (4, 4), (1, 4))
    b = g.call(aten.relu.default, g.call(aten.tanh.default, whole))
    c = g.call(aten.relu.default, g.call(aten.tanh.default, turned))
    for value in (b, c):
        g.builder.output(value.buffer)
    assert names(g.fused()) == ["t0*4", "t4*2"]


def test_a_region_that_cannot_be_compiled_stays_as_it_was_and_a_note_names_it() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    a = g.call(aten.relu.default, g.call(aten.tanh.default, x, name="gelu"))
    g.builder.output(a.buffer)

    def refused(region: Region, device: torch.device) -> Fused:
        raise RuntimeError("no compiler\nand a long trace")

    found = fused(g.graph, refused)
    assert found.tasks == g.graph.tasks
    assert found.notes == ("fused: gelu*2 stays 2 tasks: RuntimeError: no compiler",)


def test_the_order_that_random_draws_keep_is_kept() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    first = g.call(aten.rand_like.default, x)
    a = g.call(aten.relu.default, g.call(aten.tanh.default, first))
    second = g.call(aten.rand_like.default, a, after=(0,))
    g.builder.output(g.call(aten.add.Tensor, second, a, after=(3,)).buffer)
    found = g.fused()
    assert names(found) == ["t0", "t1*2", "t3", "t4"]
    assert [task.after for task in found.tasks] == [(), (), (0,), (2,)]


def test_it_is_never_done_unless_it_is_asked_for_by_name() -> None:
    g = Graph()
    x = g.value("x", Role.INPUT)
    a = g.call(aten.relu.default, g.call(aten.tanh.default, x))
    g.builder.output(a.buffer)
    assert not any(isinstance(c.op, Fused) for t in lower(g.graph).tasks for c in t.kernel.calls)
    with pytest.raises(GraphError, match=r"passes by name are: \['chunked_loss', 'fused'\]"):
        lower(g.graph, also=("fuse",))
