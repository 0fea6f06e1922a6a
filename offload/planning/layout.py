"""What a walk of the planner knows of places: what lies where, and which bytes are free. Pure."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

from offload.graph.memgraph import Block, Place
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.planning.arena import HeldAddresses, Space
from offload.planning.node_list import Copy
from offload.planning.refusal import refuse_arena, scratch_bytes
from offload.planning.victims import NEVER, Stake, Victims, WalkedUses


class DeviceWalk:
    """What the walk knows of one device: its tasks, and the copies that lie there."""

    def __init__(
        self, graph: TaskGraph, number: int, space: Space, stake: Callable[[int], Stake | None]
    ) -> None:
        self.number, self.space = number, space
        self.tasks = [n for n, task in enumerate(graph.tasks) if task.device == number]
        self.placed = self.executed = 0
        """How many of its tasks have their places, and how many have run."""
        self.resumes = 0
        """Before this task of all devices, its next one finds no place."""
        self.uses = WalkedUses(graph, number)
        self.victims = Victims(space, stake)
        self.copies: dict[int, Copy] = {}
        self.filled: set[int] = set()
        """The buffers whose copy has its content, and not only its place."""
        self.may_drop = False
        """Whether a block may be dropped now, and could not be at the last look."""

    @property
    def ahead(self) -> int:
        return self.placed - self.executed

    def pop(self, b: int) -> Copy:
        self.filled.discard(b)
        return self.copies.pop(b)


class Layout:
    """Where everything lies now, and where it has been."""

    def __init__(
        self,
        graph: TaskGraph,
        capacities: Mapping[int, int],
        host_workers: int,
        stake: Callable[[int, int], Stake | None],
    ) -> None:
        """`stake`: of a device and a buffer."""
        self.spaces = {device: Space(capacities[device]) for device in graph.devices}
        self.spaces[HOST] = Space(capacities.get(HOST, NEVER))
        self.host = HeldAddresses(self.spaces[HOST], host_workers)
        self.devices = {
            device: DeviceWalk(graph, device, self.spaces[device], partial(stake, device))
            for device in graph.devices
        }
        self.on_host: dict[int, Copy] = {}
        self.host_valid: set[int] = set()
        """Buffers whose copy on the host is up to date."""
        self.workspaces: dict[int, Copy] = {}
        """By task that has its place and has not run."""
        self.blocks: list[Block] = []
        """What has given up its place."""
        self.starts: dict[int, Place] = {}
        self.ends: dict[int, Place] = {}
        self.scratch: dict[int, Place] = {}

    def can_move(self, b: int, device: DeviceWalk) -> bool:
        return b not in self.starts or self.starts[b].arena != device.number

    def is_elsewhere(self, b: int, device: DeviceWalk) -> bool:
        """Whether the host or another device has the content of a buffer."""
        if b in self.host_valid:
            return True
        return any(b in other.filled for other in self.devices.values() if other is not device)

    def begin_with(self, b: int, place: Place, size: int) -> None:
        """Have a buffer at a place when the step begins."""
        self.starts[b] = place
        copy = Copy(place, size, b, [], from_start=True)
        if place.arena == HOST:
            self.on_host[b] = copy
            self.host_valid.add(b)
        else:
            self.devices[place.arena].copies[b] = copy
            self.devices[place.arena].filled.add(b)

    def release(self, copy: Copy, to_end: bool = False) -> None:
        """Note that a copy gives up its place, or has it to the end of the step."""
        self.blocks.append(
            Block(copy.place, copy.buffer, tuple(copy.nodes), copy.from_start, to_end)
        )
        if to_end:
            return
        if copy.place.arena == HOST:
            self.host.give(copy.place.offset, copy.history(), copy.host_seconds)
        else:
            self.spaces[copy.place.arena].give(copy.place.offset, copy.history())


def lay_out_start(
    layout: Layout, graph: TaskGraph, resident: Collection[int], homes: Mapping[int, Place]
) -> None:
    """Give what holds something before the step its place: where it has its home already, on its
    device if it is resident, or else on the host."""
    used = {b for task in graph.tasks for b in task.touches}
    used |= {*graph.outputs, *graph.kept, *homes}
    begin = [
        number
        for number, buffer in enumerate(graph.buffers)
        if (buffer.persistent or buffer.role is Role.INPUT) and number in used
    ]
    # The pieces of a tensor lie side by side. Inputs come last, as they leave a free rest.
    begin.sort(
        key=lambda b: (
            b not in homes,
            graph.buffers[b].role is Role.INPUT,
            graph.buffers[b].tensor,
            graph.buffers[b].start,
            b,
        )
    )
    home_devices = graph.home_devices()
    for b in begin:
        buffer, home = graph.buffers[b], homes.get(b)
        arena = home_devices[b] if b in resident else HOST
        arena, offset = (arena, None) if home is None else (home.arena, home.offset)
        size = graph.align(buffer.nbytes)
        offset = _take_at_start(layout.spaces[arena], arena, size, buffer.name, offset)
        layout.begin_with(b, Place(arena, offset, buffer.nbytes), size)
    for device in layout.devices:
        if small := scratch_bytes(graph, device):
            space = layout.spaces[device]
            offset = _take_at_start(space, device, small, "the scratch memory", None)
            layout.scratch[device] = Place(device, offset, small)


def _take_at_start(space: Space, arena: int, size: int, name: str, offset: int | None) -> int:
    # Nothing was freed yet, so the best fit is the lowest address, side by side with the others.
    start = space.best_fit(size) if offset is None else offset
    if start is None:
        refuse_arena(arena, space.used + size, space.capacity, name)
    if start + size > space.capacity:
        # A home that another plan chose: the kernels of this graph allocate more beside it.
        refuse_arena(arena, start + size, space.capacity, name)
    space.take(start, size, name)
    return start
