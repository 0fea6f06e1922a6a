"""Which graphs of a fit are kept: the ones that were used last, up to a number of bytes."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from offload.graph.taskgraph import Task, TaskGraph
from trainers.offloading.steps import graph_cache
from trainers.offloading.steps.graph_cache import TASK_BYTES, GraphCache


class Valid:
    def holds(self) -> bool:
        return True


@dataclass(eq=False)
class Served:
    name: str
    tasks: int = 1
    validity: Any = field(default_factory=Valid)

    @property
    def graph(self) -> TaskGraph:
        return TaskGraph(tasks=(Task("f", (), ()),) * self.tasks)


@pytest.fixture
def dropped() -> list[str]:
    return []


@pytest.fixture
def cache(dropped: list[str], monkeypatch: pytest.MonkeyPatch) -> GraphCache[Served]:
    monkeypatch.setattr(graph_cache, "KEPT_BYTES", 10 * TASK_BYTES)
    return GraphCache("the step", lambda step: dropped.append(step.name))


def test_small_graphs_of_many_shapes_are_kept_and_the_oldest_are_dropped(
    cache: GraphCache[Served], dropped: list[str]
) -> None:
    for number in range(10):
        cache.put(number, Served(str(number)))
    assert cache.find(0) is not None and dropped == []
    cache.put("large", Served("large", 3))
    assert dropped == ["1", "2", "3"]
    assert cache.find(1) is None and cache.find(0) is not None


def test_a_graph_that_is_too_large_alone_is_kept(
    cache: GraphCache[Served], dropped: list[str]
) -> None:
    cache.put("a", Served("a", 5))
    cache.put("b", Served("b", 11))
    assert dropped == ["a"] and cache.find("b") is not None


def test_the_graph_that_was_used_last_of_those_that_fit_is_found(cache: GraphCache[Served]) -> None:
    for name in "abc":
        cache.put("same", Served(name))
    found = cache.find("same", lambda step: step.name in "ab")
    assert found is not None and found.name == "b"
    found = cache.find("same", lambda step: step.name == "a")
    assert found is not None and found.name == "a"
    again = cache.find("same")
    assert again is found
