"""Makespans that were worked out by hand. A node's number is its priority."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counted_calls import calls_of

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, MemGraph, Node, lane_name
from offload.planning.simulator import Simulation, simulate

# A second a byte, each way.
SLOW = Costs(h2d=1, d2h=1, copy=0)


class Steps:
    """Nodes of whole seconds."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self.nodes: list[Node] = []

    def task(
        self, seconds: float, *deps: int, lane: str = "compute", device: int = 0, live: int = 0
    ) -> int:
        made = self.builder.buffer(f"b{len(self.nodes)}", live)
        task = self.builder.task("t", writes=[made], seconds=seconds, lane=lane, device=device)
        lane = lane_name(lane, device)
        return self._add(Node(TASK, lane, (), deps, task))

    def copy(self, kind: str, seconds: int, *deps: int, device: int = 0, at: int = 0) -> int:
        lane = lane_name("h2d" if kind == RELOAD else "d2h", device)
        return self._add(Node(kind, lane, (), deps, at, 0, seconds))

    def memgraph(self) -> MemGraph:
        return MemGraph(self.builder.graph(), tuple(self.nodes), {}, {}, {}, (), {})

    def simulate(self, costs: Costs = SLOW, order: str = "priority", seed: int = 0) -> Simulation:
        return simulate(self.memgraph(), costs, order, seed)

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1


def test_independent_lanes_run_at_the_same_time() -> None:
    steps = Steps()
    steps.task(3)
    steps.copy(RELOAD, 5)
    steps.copy(OFFLOAD, 4)
    found = steps.simulate()
    assert found.makespan == 5
    assert found.busy == {"compute": 3, "h2d": 5, "d2h": 4}
    assert (found.bound.seconds, found.bound.lane) == (5, "h2d")
    assert found.bound.parts == {"compute": 3, "h2d": 5, "d2h": 4, "critical path": 5}


def test_a_node_starts_when_the_last_that_it_waits_for_ends() -> None:
    steps = Steps()
    a, b = steps.task(2), steps.copy(RELOAD, 5)
    steps.task(1, a, b)
    found = steps.simulate()
    assert found.timeline == (
        (0, "compute", 0, 2),
        (1, "h2d", 0, 5),
        (2, "compute", 5, 6),
    )
    assert (found.bound.seconds, found.bound.lane) == (6, "critical path")


def test_an_idle_lane_takes_the_ready_node_of_lowest_number() -> None:
    steps = Steps()
    load = steps.copy(RELOAD, 2)
    steps.task(10, load)
    steps.task(3)
    steps.task(1)
    found = steps.simulate()
    # Node 2 is ready at once and is not broken off when node 1 gets ready; then 1 goes first.
    assert [(number, begin) for number, _, begin, _ in found.timeline] == [
        (0, 0),
        (2, 0),
        (1, 3),
        (3, 13),
    ]


def test_in_order_a_lane_waits_for_its_next_node() -> None:
    steps = Steps()
    load = steps.copy(RELOAD, 2)
    steps.task(10, load)
    steps.task(3)
    found = steps.simulate(order="in_order")
    assert [(number, begin) for number, _, begin, _ in found.timeline] == [(0, 0), (1, 2), (2, 12)]
    assert found.makespan == 15
    assert steps.simulate().makespan == 13


def test_two_directions_that_share_a_link_slow_each_other_down_while_both_copy() -> None:
    steps = Steps()
    steps.copy(RELOAD, 6)
    steps.task(2)
    steps.copy(OFFLOAD, 2, 1)
    steps.copy(OFFLOAD, 1, 2)
    found = steps.simulate(replace(SLOW, shared=0.5))
    # Two seconds alone, six at half its pace, and the last one alone again.
    assert [(node, start, end) for node, _, start, end in found.timeline] == [
        (0, 0, 9),
        (1, 0, 2),
        (2, 2, 6),
        (3, 6, 8),
    ]
    assert found.bound.parts["link"] == 9
    assert (found.bound.seconds, found.bound.lane) == (9, "link")
    assert steps.simulate().makespan == 6


def test_links_of_two_devices_do_not_slow_each_other_down() -> None:
    steps = Steps()
    steps.copy(RELOAD, 6)
    steps.copy(OFFLOAD, 6, device=1)
    assert steps.simulate(replace(SLOW, shared=0.5)).makespan == 6


@given(
    st.lists(st.tuples(st.sampled_from([RELOAD, OFFLOAD]), st.integers(1, 9)), max_size=12),
    st.floats(0.5, 0.99),
)
def test_a_shared_link_lets_nothing_be_faster_than_its_bound(
    copies: list[tuple[str, int]], shared: float
) -> None:
    steps = Steps()
    for kind, seconds in copies:
        steps.copy(kind, seconds)
    found = steps.simulate(replace(SLOW, shared=shared))
    assert found.makespan == pytest.approx(found.bound.seconds)
    assert len(found.timeline) == len(copies)


def test_the_host_runs_as_many_as_it_has_workers() -> None:
    steps = Steps()
    for _ in range(5):
        steps.task(2, lane="host")
    two = steps.simulate(Costs(host_workers=2))
    assert two.makespan == 6
    assert two.busy == {"host": 10}
    assert (two.bound.seconds, two.bound.lane) == (5, "host")
    assert steps.simulate(Costs(host_workers=5)).makespan == 2


def test_copies_and_tasks_cost_what_the_machine_says() -> None:
    steps = Steps()
    steps.builder.task("f", flops=40.0, traffic=10)
    steps.nodes.append(Node(TASK, "compute", (), (), 0))
    steps.copy(RELOAD, 30, 0)
    steps.copy(OFFLOAD, 30, 1)
    costs = Costs(flops=10, memory=100, launch=1, h2d=10, d2h=15, copy=0.5)
    assert steps.simulate(costs).makespan == 5 + 3.5 + 2.5


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="'fifo' is unknown; choose priority, random or in_order"):
        Steps().simulate(order="fifo")


@st.composite
def random_steps(draw: st.DrawFn) -> Steps:
    steps = Steps()
    for number in range(draw(st.integers(0, 25))):
        before = st.sets(st.integers(0, number - 1), max_size=3) if number else st.just(set())
        deps, seconds = sorted(draw(before)), draw(st.integers(0, 9))
        kind = draw(st.sampled_from(["compute", "host", OFFLOAD, RELOAD]))
        device = 0 if kind == "host" else draw(st.integers(0, 1))
        if kind in (OFFLOAD, RELOAD):
            at = draw(st.integers(0, max(0, len(steps.builder.tasks) - 1)))
            steps.copy(kind, seconds, *deps, device=device, at=at)
        else:
            steps.task(seconds, *deps, lane=kind, device=device)
    return steps


@given(random_steps(), st.sampled_from(["priority", "random", "in_order"]), st.integers(1, 3))
@settings(deadline=None)
def test_every_order_runs_each_node_after_its_deps_within_the_bounds(
    steps: Steps, order: str, workers: int
) -> None:
    found = steps.simulate(replace(SLOW, host_workers=workers), order)
    assert found.bound.seconds <= found.makespan * (1 + 1e-9)
    assert found.bound.seconds == found.bound.parts[found.bound.lane]
    assert found.bound.seconds == max(found.bound.parts.values())
    # Some lane works at every moment.
    assert found.makespan <= sum(found.busy.values())
    ends: dict[int, float] = {}
    for number, _, begin, end in found.timeline:
        assert all(ends[dep] <= begin for dep in steps.nodes[number].deps)
        ends[number] = end
    assert len(ends) == len(steps.nodes) == len(found.timeline)


def test_the_work_of_simulating_grows_with_the_number_of_nodes() -> None:
    def calls(count: int) -> int:
        steps = Steps()
        for number in range(0, 2 * count, 2):
            load = steps.copy(RELOAD, 1, *range(max(0, number - 1), number))
            steps.task(1, load)
        return calls_of(steps.simulate)

    assert calls(2000) <= 1.3 * 10 * calls(200)
