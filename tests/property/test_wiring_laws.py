"""Laws of the topology that is made of measured rates."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.graph.costs import Costs
from offload.graph.taskgraph import HOST
from offload.graph.topology import Topology, share_fairly
from offload.graph.wiring import LinkRates, Way, list_at_once, with_links

LINK = 20.0
SPREAD = 0.03
"""What is measured is off by up to this share."""
NEAR = 2.5 * SPREAD


def ends_of(way: Way) -> tuple[int, int]:
    return (HOST, way[1]) if way[0] == "h2d" else (way[1], HOST)


def true_rates(ways: Sequence[Way], wires: Topology, shared: float) -> Sequence[float]:
    counts = [sum(other[1] == device for other in ways) for _, device in ways]
    most = [LINK * (shared if count == 2 else 1.0) for count in counts]
    return share_fairly(most, [[*wires.list_uses(*ends_of(w), LINK, LINK)] for w in ways])


@st.composite
def measured(draw: st.DrawFn, devices: int, wires: Topology, shared: float) -> LinkRates:
    """What is measured of these wires, with noise."""

    def noisy(rate: float) -> float:
        return rate * draw(st.floats(1 - SPREAD, 1 + SPREAD))

    def measure_at_once(ways: Sequence[Way]) -> dict[Way, float]:
        return dict(zip(ways, map(noisy, true_rates(ways, wires, shared)), strict=True))

    return LinkRates(
        {(name, d): noisy(LINK) for name in ("h2d", "d2h") for d in range(devices)},
        [measure_at_once(ways) for ways in list_at_once(devices)],
        {(0, device): noisy(LINK) for device in range(1, devices)},
    )


def found_of(data: st.DataObject, devices: int, wires: Topology, shared: float) -> Topology:
    rates = data.draw(measured(devices, wires, shared))
    costs = Costs(h2d=LINK, d2h=LINK, shared=shared, host_memory=5.0, host_workers=2)
    found = with_links(costs, rates).topology
    assert found is not None and found.between is None
    for at_once in rates.at_once:
        assert found.dram is None or sum(at_once.values()) <= found.dram
        for name in ("h2d", "d2h"):
            for group in found.uplinks:
                assert sum(at_once.get((name, d), 0.0) for d in group) <= found.uplink
    return found


SHARED = st.sampled_from([1.0, 0.8, 0.6])
DEVICES = st.sampled_from([2, 3, 4, 6])


@given(st.data(), DEVICES, SHARED)
@settings(deadline=None)
def test_nothing_is_shared_where_all_links_run_at_full_speed(
    data: st.DataObject, devices: int, shared: float
) -> None:
    found = found_of(data, devices, Topology(), shared)
    assert (found.dram, found.uplinks) == (None, ())


@given(st.data(), DEVICES, SHARED, st.floats(0.15, 0.8))
@settings(deadline=None)
def test_the_rate_of_the_hosts_memory_is_found_alone(
    data: st.DataObject, devices: int, shared: float, share: float
) -> None:
    dram = share * 2 * devices * LINK * shared
    found = found_of(data, devices, Topology(dram), shared)
    assert found.dram == pytest.approx(dram, rel=NEAR)
    assert found.uplinks == ()


@given(st.data(), st.sampled_from([2, 4, 6]), SHARED, st.floats(0.55, 0.8))
@settings(deadline=None)
def test_the_rate_of_uplinks_is_found_with_the_devices_behind_them(
    data: st.DataObject, devices: int, shared: float, share: float
) -> None:
    half = devices // 2
    pairs = tuple((device, device + half) for device in range(half))
    uplink = share * 2 * LINK
    found = found_of(data, devices, Topology(uplinks=pairs, uplink=uplink), shared)
    assert found.dram is None
    assert found.uplinks == pairs
    assert found.uplink == pytest.approx(uplink, rel=NEAR)


@given(st.data(), st.floats(0.35, 0.8))
@settings(deadline=None)
def test_uplinks_and_the_hosts_memory_are_told_apart(data: st.DataObject, share: float) -> None:
    pairs, uplink = ((0, 1), (2, 3)), LINK * 1.2
    wires = Topology(dram=share * 4 * uplink, uplinks=pairs, uplink=uplink)
    found = found_of(data, 4, wires, 1.0)
    assert found == replace(
        wires,
        dram=pytest.approx(wires.dram, rel=NEAR),
        uplink=pytest.approx(uplink, rel=NEAR),
    )
