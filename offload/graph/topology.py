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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from offload.graph.memgraph import lane_name
from offload.graph.taskgraph import HOST

DRAM = "DRAM"


class Use(NamedTuple):
    """Something that a copy goes over."""

    name: str
    rate: float
    """Bytes per second of all that go over it."""
    times: int = 1
    """How often each byte does."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How devices are wired. Rates are bytes per second, and of each direction."""

    dram: float
    """What copies and tasks of the host read and write together."""
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
        yield self.use_of_memory(len(ends))

    def use_of_memory(self, times: int = 1) -> Use:
        """The use of the host's memory, by a copy or a task of the host."""
        return Use(DRAM, self.dram, times)
