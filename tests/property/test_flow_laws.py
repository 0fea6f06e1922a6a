"""Laws of what shares links, uplinks and the host's memory: max-min fairness."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import (
    OFFLOAD,
    RELOAD,
    SEND,
    TASK,
    MemGraph,
    Node,
    lane_name,
    lane_of_copy,
)
from offload.graph.taskgraph import HOST
from offload.graph.topology import Topology, Use, share_fairly
from offload.planning.simulator import Simulation, simulate

NEAR = 1 + 1e-6
RATES = st.floats(0.1, 100.0)


@st.composite
def shares(draw: st.DrawFn) -> tuple[list[float], list[list[Use]]]:
    """Flows, and what each of them goes over."""
    things = [(name, draw(RATES)) for name in "abcd"[: draw(st.integers(1, 4))]]
    most = draw(st.lists(RATES, min_size=1, max_size=8))
    uses = [
        [Use(name, rate, draw(st.integers(1, 2))) for name, rate in things if draw(st.booleans())]
        for _ in most
    ]
    return most, uses


def taken(rates: list[float], uses: list[list[Use]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for rate, over in zip(rates, uses, strict=True):
        for name, _, times in over:
            sums[name] = sums.get(name, 0.0) + times * rate
    return sums


@given(shares())
@settings(deadline=None)
def test_nothing_is_used_beyond_its_rate_and_nobody_is_faster_than_alone(
    given_shares: tuple[list[float], list[list[Use]]],
) -> None:
    most, uses = given_shares
    rates = share_fairly(most, uses)
    limits = {use.name: use.rate for over in uses for use in over}
    for name, used in taken(rates, uses).items():
        assert used <= limits[name] * NEAR
    assert all(0 < rate <= highest for rate, highest in zip(rates, most, strict=True))


@given(shares())
@settings(deadline=None)
def test_whoever_gets_more_takes_it_from_somebody_who_has_no_more(
    given_shares: tuple[list[float], list[list[Use]]],
) -> None:
    """A flow is as fast as alone, or it goes over something that is used up and in which nobody is
    faster."""
    most, uses = given_shares
    rates = share_fairly(most, uses)
    used = taken(rates, uses)
    for rate, highest, over in zip(rates, most, uses, strict=True):
        held = [
            use
            for use in over
            if used[use.name] * NEAR >= use.rate
            and all(
                other <= rate * NEAR
                for other, others in zip(rates, uses, strict=True)
                if any(o.name == use.name for o in others)
            )
        ]
        assert rate == highest or held


# ---- in a simulated step ------------------------------------------------------------------------

FOUR = Topology(dram=30.0, uplinks=((0, 1), (2, 3)), uplink=10.0)
COSTS = Costs(h2d=10.0, d2h=10.0, d2d=40.0, copy=0, host_memory=20.0, launch=0, topology=FOUR)


def run(*nodes: tuple[str, int, int, int], costs: Costs = COSTS) -> Simulation:
    """Each node begins at once: (kind, source, target, bytes); of a task of the host only bytes."""
    builder = GraphBuilder()
    made: list[Node] = []
    for kind, source, target, nbytes in nodes:
        if kind == TASK:
            task = builder.task("update", lane="host", traffic=nbytes)
            made.append(Node(TASK, lane_name("host"), (), (), task))
        else:
            lane = lane_of_copy(source, target)
            made.append(Node(kind, lane, (), (), -1, 0, nbytes))
    builder.buffer("b", 1)
    return simulate(MemGraph(builder.graph(), tuple(made), {}, {}, {}, (), {}), costs)


@st.composite
def copies(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    found: list[tuple[str, int, int, int]] = []
    for _ in range(draw(st.integers(1, 12))):
        a, b = draw(st.permutations(range(4)))[:2]
        kind, source, target = draw(
            st.sampled_from([(OFFLOAD, a, HOST), (RELOAD, HOST, a), (SEND, a, b), (TASK, 0, 0)])
        )
        found.append((kind, source, target, draw(st.integers(0, 100))))
    return found


@given(copies(), st.sampled_from([1.0, 0.8, 0.4]))
@settings(deadline=None)
def test_with_a_topology_that_never_binds_the_times_are_those_without(
    nodes: list[tuple[str, int, int, int]], shared: float
) -> None:
    nodes = [node for node in nodes if node[0] != SEND]
    without = replace(COSTS, topology=None, shared=shared)
    wide = replace(without, topology=Topology(dram=1e6))
    found, expected = run(*nodes, costs=wide), run(*nodes, costs=without)
    assert found.makespan == pytest.approx(expected.makespan)
    assert found.busy == expected.busy


@given(copies(), st.sampled_from([None, 8.0]))
@settings(deadline=None)
def test_no_step_is_faster_than_its_bound_or_slower_than_one_by_one(
    nodes: list[tuple[str, int, int, int]], between: float | None
) -> None:
    costs = replace(COSTS, topology=replace(FOUR, between=between))
    found = run(*nodes, costs=costs)
    assert found.bound.seconds <= found.makespan * NEAR
    one_by_one = sum(run(node, costs=costs).makespan for node in nodes)
    assert found.makespan <= one_by_one * NEAR


@pytest.mark.parametrize(
    "node, seconds",
    [
        ((OFFLOAD, 1, HOST, 100), 100 / 10),
        ((RELOAD, HOST, 3, 100), 100 / 10),
        ((SEND, 0, 2, 100), 100 / 10),
        ((TASK, 0, 0, 100), 100 / 20),
    ],
)
def test_what_is_alone_takes_its_bytes_by_its_rate(
    node: tuple[str, int, int, int], seconds: float
) -> None:
    assert run(node).makespan == pytest.approx(seconds)


def test_devices_behind_one_uplink_share_it() -> None:
    both = run((RELOAD, HOST, 0, 100), (RELOAD, HOST, 1, 50), (RELOAD, HOST, 2, 100))
    ends = {node: end for node, _, _, end in both.timeline}
    # 0 and 1 have half of it until 1 ends; 2 has the other uplink for itself.
    assert ends == {0: pytest.approx(15), 1: pytest.approx(10), 2: pytest.approx(10)}
    assert both.bound.parts["uplink 0 h2d"] == pytest.approx(15)
    assert (both.bound.lane, both.bound.seconds) == ("uplink 0 h2d", pytest.approx(15))


def test_memory_is_shared_by_copies_and_updates() -> None:
    found = run((TASK, 0, 0, 200), (RELOAD, HOST, 0, 100), (OFFLOAD, 2, HOST, 100))
    # 30 bytes a second are there, 10 for each; when the copies have ended, the update has 20.
    ends = {node: end for node, _, _, end in found.timeline}
    assert ends == {0: pytest.approx(15), 1: pytest.approx(10), 2: pytest.approx(10)}
    assert found.bound.parts["DRAM"] == pytest.approx(400 / 30)


def test_what_is_sent_through_the_host_goes_over_two_links_and_twice_over_its_memory() -> None:
    found = run((SEND, 0, 2, 100), (OFFLOAD, 0, HOST, 100))
    assert found.makespan == pytest.approx(20)
    assert found.bound.parts["DRAM"] == pytest.approx(300 / 30)
    assert found.bound.parts["d2h"] == pytest.approx(20)
    direct = replace(COSTS, topology=replace(FOUR, between=5.0))
    found = run((SEND, 0, 2, 100), (SEND, 0, 1, 100), (OFFLOAD, 0, HOST, 100), costs=direct)
    assert found.makespan == pytest.approx(40)
    assert found.bound.parts["out of device 0"] == pytest.approx(40)
