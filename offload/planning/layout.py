"""What a walk of the planner knows of places: what lies where, and which bytes are free. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offload.graph.memgraph import Block, Place
from offload.graph.taskgraph import HOST
from offload.planning.arena import HeldAddresses, Space
from offload.planning.node_list import Copy
from offload.planning.victims import NEVER


@dataclass(slots=True, eq=False)
class Layout:
    """Where everything lies now, and where it has been."""

    on_device: dict[int, Copy] = field(default_factory=dict)
    on_host: dict[int, Copy] = field(default_factory=dict)
    host_valid: set[int] = field(default_factory=set)
    """Buffers whose copy on the host is up to date."""
    host_writes: set[int] = field(default_factory=set)
    """Buffers that placed host tasks will write when they run."""
    workspaces: dict[int, Copy] = field(default_factory=dict)
    """By task that has its place and has not run."""
    blocks: list[Block] = field(default_factory=list)
    """What has given up its place."""
    starts: dict[int, Place] = field(default_factory=dict)
    ends: dict[int, Place] = field(default_factory=dict)
    scratch: dict[int, Place] = field(default_factory=dict)


class AddressSpaces:
    """The addresses of each device and of the host."""

    def __init__(
        self, devices: Iterable[int], capacities: Mapping[int, int], host_workers: int
    ) -> None:
        self.spaces = {device: Space(capacities[device]) for device in devices}
        self.spaces[HOST] = Space(capacities.get(HOST, NEVER))
        self.host = HeldAddresses(self.spaces[HOST], host_workers)

    def give(self, copy: Copy) -> None:
        """Free the bytes of a copy."""
        if copy.place.arena == HOST:
            self.host.give(copy.place.offset, copy.history(), copy.host_seconds)
        else:
            self.spaces[copy.place.arena].give(copy.place.offset, copy.history())
