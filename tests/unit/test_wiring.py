"""From the rates of several devices' copies to a topology, by numbers worked out by hand."""

from collections.abc import Callable, Sequence

import pytest

from offload.graph.costs import Costs
from offload.graph.topology import Topology
from offload.graph.wiring import LinkRates, list_at_once, with_links
from offload.measuring.links import measure_links
from offload.measuring.stopwatch import Cpu

COSTS = Costs(h2d=10, d2h=10, d2d=900, host_memory=20, host_workers=3)
ALONE = {(name, device): 10.0 for name in ("h2d", "d2h") for device in range(4)}
PEERS = {(0, device): 9.0 for device in (1, 2, 3)}


def at_once(*together: tuple[int, int], both: float, of_all: float) -> LinkRates:
    """`together`: the devices of which two have as much as one. `of_all`: in one direction."""
    rates: list[dict[tuple[str, int], float]] = []
    for ways in list_at_once(4):
        devices = tuple(device for _, device in ways)
        total = 10.0 if devices in together else 20.0
        if len(ways) > 2:
            total = of_all if len(ways) == 4 else both
        rates.append({way: total / len(ways) for way in ways})
    return LinkRates(ALONE, rates, PEERS)


def test_each_two_devices_and_all_of_them_are_measured_at_once() -> None:
    assert [*list_at_once(2)] == [
        [("h2d", 0), ("h2d", 1)],
        [("d2h", 0), ("d2h", 1)],
        [("h2d", 0), ("d2h", 0), ("h2d", 1), ("d2h", 1)],
    ]
    assert [len(ways) for ways in list_at_once(3)] == [2] * 6 + [3, 3, 6]


def test_pairs_behind_an_uplink_and_the_memory_are_found() -> None:
    found = with_links(COSTS, at_once((0, 1), (2, 3), both=30, of_all=20)).topology
    # Updates read and write 60 a second, and copies 30, so a byte of an update takes half as much.
    assert found == Topology(30, 0.5, ((0, 1), (2, 3)), 10)


def test_what_nobody_waits_for_is_not_there() -> None:
    costs = with_links(COSTS, at_once(both=80, of_all=40))
    assert costs.topology == Topology()
    assert (costs.send, costs.h2d) == (9, 10)


def test_devices_of_which_only_all_are_slower_share_one_uplink() -> None:
    assert with_links(COSTS, at_once(both=50, of_all=25)).topology == Topology(
        uplinks=((0, 1, 2, 3),), uplink=25
    )


def test_a_link_between_devices_is_one_that_is_faster_than_those_to_the_host() -> None:
    rates = at_once(both=80, of_all=40)
    fast = LinkRates(rates.alone, rates.at_once, {(0, 1): 300, (1, 2): 290, (2, 3): 310})
    costs = with_links(COSTS, fast)
    assert costs.topology == Topology(between=290)
    assert costs.send == 290


def test_a_plan_reckons_with_the_slowest_link() -> None:
    rates = at_once(both=80, of_all=40)
    slow = LinkRates({**rates.alone, ("d2h", 3): 4.0}, rates.at_once, PEERS)
    assert (with_links(COSTS, slow).h2d, with_links(COSTS, slow).d2h) == (10, 4)


def repeat_once(run: Callable[[], Sequence[float]], seconds: float) -> list[Sequence[float]]:
    assert seconds == pytest.approx(0.5)
    return [run()]


def test_what_is_measured_is_what_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Cpu()
    took = {1: 2.0, 2: 4.0, 4: 8.0}
    monkeypatch.setattr(
        bench, "time_at_once", lambda copies, times: [took[len(copies)]] * len(copies)
    )
    found = measure_links(bench, 2, 64, 4.0, repeat_once)
    assert set(found.alone.values()) == {32.0}
    assert [sum(rates.values()) for rates in found.at_once] == [32.0, 32.0, 32.0]
    assert found.peers == {(0, 1): 32.0}
    assert with_links(Costs(h2d=32, d2h=32), found).topology == Topology(32.0, 32.0 / 8e9)
