"""Finds out what several devices share from the rates of copies, alone and at once. Pure.

    measured   alone: 10 each   at once: 0 and 1: 10   0 and 2: 20   all: 20   all, both ways: 30
    found      0 and 1 have an uplink of 10, and so have 2 and 3; the host's memory brings 30

Of all topologies the simplest one is taken that foretells all rates at once, within the noise. Its
capacities are the most that was measured, so a plan never waits for what was faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil

from offload.graph.costs import Costs
from offload.graph.taskgraph import HOST
from offload.graph.topology import Topology, Use, share_fairly

NOISE = 0.1
"""Rates that differ by less are equal."""
WAYS = ("h2d", "d2h")
Way = tuple[str, int]
"""The direction of a copy, h2d or d2h, and its device."""
Rates = Mapping[Way, float]


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second of large copies."""

    alone: Rates
    at_once: Sequence[Rates]
    """Copies that ran at the same time: of two devices, of all, and of all in both directions."""
    peers: Mapping[tuple[int, int], float]
    """From one device to another."""


def list_at_once(devices: int) -> Iterator[Sequence[Way]]:
    """What is to be measured at once, of so many devices."""
    everyone = range(devices)
    if devices > 2:
        for pair in combinations(everyone, 2):
            for name in WAYS:
                yield [(name, device) for device in pair]
    for names in (*([name] for name in WAYS), WAYS):
        yield [(name, device) for device in everyone for name in names]


def with_links(costs: Costs, found: LinkRates) -> Costs:
    """The costs of one device, with what was measured of several. A plan takes the links to be
    alike, and reckons with the slowest."""
    h2d, d2h = (min(r for way, r in found.alone.items() if way[0] == name) for name in WAYS)
    peer = min(found.peers.values())
    costs = replace(costs, h2d=min(h2d, costs.h2d), d2h=min(d2h, costs.d2h), d2d=peer)
    between = peer if peer > max(found.alone.values()) * (1 + NOISE) else None
    return replace(costs, topology=replace(_find_shared(costs, found), between=between))


def _find_shared(costs: Costs, found: LinkRates) -> Topology:
    dram = max(sum(rates.values()) for rates in found.at_once)
    by_tasks = min(1.0, dram / (costs.host_memory * costs.host_workers))
    everyone = tuple(sorted({device for _, device in found.alone}))
    groups = [(), _find_groups(found, dram), (everyone,)]
    candidates = [
        Topology(*memory, uplinks, _most_of_a_group(found, uplinks))
        for uplinks in groups
        for memory in ((None, 1.0), (dram, by_tasks))
    ]
    return min(candidates, key=lambda each: _count_noise(each, costs.shared, found))


def _find_groups(found: LinkRates, dram: float) -> tuple[tuple[int, ...], ...]:
    """The devices of which two are slower at once than alone, though the memory brings more."""
    group = {device: {device} for _, device in found.alone}
    for rates in found.at_once:
        devices = {device for _, device in rates}
        expected = min(sum(found.alone[way] for way in rates), dram)
        is_slower = expected > sum(rates.values()) * (1 + NOISE)
        if len(rates) == len(devices) == 2 and is_slower:
            joined = set[int]().union(*(group[device] for device in devices))
            group |= dict.fromkeys(joined, joined)
    return tuple(sorted({tuple(sorted(each)) for each in group.values() if len(each) > 1}))


def _most_of_a_group(found: LinkRates, groups: Sequence[Sequence[int]]) -> float:
    return max(
        (
            sum(rates.get((name, device), 0.0) for device in group)
            for rates in found.at_once
            for group in groups
            for name in WAYS
        ),
        default=0.0,
    )


def _count_noise(topology: Topology, shared: float, found: LinkRates) -> int:
    """How many times the noise this topology foretells more than was measured, where it is most."""
    excess = max(
        sum(_foretell(topology, shared, found.alone, rates)) / sum(rates.values()) - 1
        for rates in found.at_once
    )
    return max(1, ceil(excess / NOISE))


def _foretell(topology: Topology, shared: float, alone: Rates, at_once: Rates) -> Sequence[float]:
    most, uses = list[float](), list[list[Use]]()
    for name, device in at_once:
        rate = alone[name, device]
        ends = (HOST, device) if name == "h2d" else (device, HOST)
        uses.append([*topology.list_uses(*ends, rate, rate)])
        most.append(rate * shared if all((way, device) in at_once for way in WAYS) else rate)
    return share_fairly(most, uses)
