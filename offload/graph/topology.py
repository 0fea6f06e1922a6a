"""What the copies of several devices share on their way. Pure.

    device 0 ---h2d--+                      a copy to or from the host goes over its device's link,
                     +--uplink--+           the uplink of its group, and the host's memory (DRAM)
    device 1 ---h2d--+          |
                                +--DRAM     what a device sends goes over a link between devices,
    device 2 ---h2d--+          |           or else to the host and from there at the same time, so
                     +--uplink--+           over DRAM twice
    device 3 ---h2d--+

All devices are alike, and all uplinks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from offload.graph.memgraph import lane_name
from offload.graph.taskgraph import HOST

DRAM = "DRAM"
ROUNDING = 1e-9
"""What a rate may differ by when it is added up in another order."""


class Use(NamedTuple):
    """Something that a copy goes over."""

    name: str
    rate: float
    """Bytes per second of all that go over it."""
    times: float = 1
    """How often each byte does."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How devices are wired. Rates are bytes per second, and of each direction."""

    dram: float | None = None
    """What goes over the host's memory together; None: as much as all links bring."""
    by_tasks: float = 1.0
    """How much of that a byte takes that a task of the host reads or writes; a copy's takes 1."""
    uplinks: tuple[tuple[int, ...], ...] = ()
    """The devices behind each uplink, such as those of one switch."""
    uplink: float = 0.0
    """What the devices behind an uplink copy together."""
    between: float | None = None
    """What a device sends to others; None: everything that it sends goes through the host."""

    def list_uses(self, source: int, target: int, h2d: float, d2h: float) -> Iterator[Use]:
        """What a copy from one arena to another goes over. `h2d`, `d2h`: the rates of a device's
        link."""
        if self.between is not None and HOST not in (source, target):
            yield Use(f"out of device {source}", self.between)
            yield Use(f"into device {target}", self.between)
            return
        ends = [("d2h", source, d2h), ("h2d", target, h2d)]
        ends = [end for end in ends if end[1] != HOST]
        for way, device, rate in ends:
            yield Use(lane_name(way, device), rate)
            for number, devices in enumerate(self.uplinks):
                if device in devices:
                    yield Use(f"uplink {number} {way}", self.uplink)
        yield from self._uses_of_memory(len(ends))

    def uses_by_tasks(self) -> tuple[Use, ...]:
        """What a task of the host goes over."""
        return self._uses_of_memory(self.by_tasks)

    def _uses_of_memory(self, times: float) -> tuple[Use, ...]:
        return () if self.dram is None else (Use(DRAM, self.dram, times),)


def share_fairly(most: Sequence[float], uses: Sequence[Sequence[Use]]) -> list[float]:
    """The rate of each flow. `most`: its rate alone; `uses`: what it goes over."""
    rates = list(most)
    left = {name: rate for over in uses for name, rate, _ in over}
    """By what is used: the bytes per second that nobody has yet."""
    rising = range(len(most))
    while rising:
        load: dict[str, float] = {}
        for flow in rising:
            for name, _, times in uses[flow]:
                load[name] = load.get(name, 0) + times
        level = min((left[name] / times for name, times in load.items()), default=inf)
        reached = [flow for flow in rising if most[flow] <= level * (1 + ROUNDING)]
        if not reached:
            full = {n for n, times in load.items() if left[n] <= level * times * (1 + ROUNDING)}
            reached = [f for f in rising if any(name in full for name, _, _ in uses[f])]
            for flow in reached:
                rates[flow] = level
        for flow in reached:
            for name, _, times in uses[flow]:
                left[name] -= rates[flow] * times
        rising = [flow for flow in rising if flow not in reached]
    return rates
