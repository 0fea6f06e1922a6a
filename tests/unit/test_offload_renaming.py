"""Tensors keep their names from plan to plan."""

import torch

from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import TaskGraph
from offload.plans.same_tensors import rename_as
from offload.program.kernels import Program, Source, Value


def graph_of(**tensors: Source) -> TaskGraph:
    builder = GraphBuilder()
    for name in tensors:
        builder.buffer(name, 4, "parameter")
    builder.task("sum", range(len(tensors)), [])
    value = Value(0, torch.float32, (1,), (1,))
    return builder.graph(Program((), (value,), tensors))


def names(graph: TaskGraph) -> list[str]:
    assert graph.program is not None
    assert set(graph.program.tensors) == {b.tensor for b in graph.buffers}
    return [buffer.tensor for buffer in graph.buffers]


def test_a_tensor_keeps_the_name_that_it_had() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    known: dict[str, Source] = {"first": a, "second": b}
    later = graph_of(first=b, second=a)
    assert names(rename_as(later, known)) == ["second", "first"]
    program = rename_as(later, known).program
    assert program is not None and program.tensors["second"] is b


def test_another_tensor_of_a_known_name_gets_one_that_is_free() -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    known: dict[str, Source] = {"w": a, "w#2": b}
    assert names(rename_as(graph_of(w=c), known)) == ["w#3"]


def test_one_of_several_tensors_over_a_storage_is_known_again() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    known: dict[str, Source] = {"tied": (a, b)}
    assert names(rename_as(graph_of(one=b), known)) == ["tied"]
