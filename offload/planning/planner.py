"""Turns a TaskGraph and bytes into a MemGraph: BUILDMEMGRAPH (DISCO, section 4). Pure.

    tasks    0 1 2 3 4 5 6 7 8 9 ...
                 ^exec     ^alloc       tasks in between have their places and have not "run" yet

The walk moves `alloc` ahead while there is room: a task gets space for its results and reloads for
its inputs early, so at run time these do not wait for its turn. If there is no room, the walk
"runs" the task at `exec`, and buffers that die there become free. A task at both horizons must get
its place. It takes the window of blocks whose next use is furthest, weighed by the bytes to move.
If its own operands are in the way, everything moves and they are laid side by side. So a plan
exists for every budget that holds the largest task.

A buffer has up to two copies, on its device and in the host arena. A clean device copy is dropped
long before its place is needed; a dirty one is offloaded shortly before. Every copy knows its last
writer and the readers since then, and free bytes remember who touched them. All dependencies are
read off these.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from offload.errors import BudgetTooSmall
from offload.graph.memgraph import OFFLOAD, RELOAD, SMALL_WORKSPACE, Block, MemGraph, Place
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.planning.arena import Piece, Space
from offload.planning.layout import AddressSpaces, Layout
from offload.planning.node_list import Copy, NodeList
from offload.planning.policies import Policy
from offload.planning.refusal import refuse, refuse_arena, scratch_bytes
from offload.planning.victims import NEVER, Stake, Victims, WalkedUses


def build_memgraph(
    graph: TaskGraph,
    capacities: Mapping[int, int],
    policy: Policy,
    clock: Collection[float] = (),
    homes: Mapping[int, Place] | None = None,
) -> MemGraph:
    """Make one plan.

    `capacities`: bytes of each device's arena, and of the host's (no entry: no limit). `clock`:
    when each task begins if nothing waits; task numbers by default. `homes`: where buffers must lie
    when the step begins."""
    homes = homes or {}
    try:
        return _Walk(graph, capacities, policy, clock, homes).run()
    except BudgetTooSmall:
        if not policy.host_workers or HOST not in capacities:
            raise
    # Addresses that are held back leave other gaps, so the host's memory may do without them.
    return _Walk(graph, capacities, replace(policy, host_workers=0), clock, homes).run()


class _Walk:
    def __init__(
        self,
        graph: TaskGraph,
        capacities: Mapping[int, int],
        policy: Policy,
        clock: Collection[float],
        homes: Mapping[int, Place],
    ) -> None:
        self.graph, self.policy = graph, policy
        self.sizes = [graph.align(buffer.nbytes) for buffer in graph.buffers]
        self.clock = list(clock) or [float(n) for n in range(len(graph.tasks))]
        self.capacities = capacities
        self.homes = homes
        self.uses = WalkedUses(graph)
        self.nodes = NodeList(graph)
        self.layout = Layout()
        self.arenas = AddressSpaces(graph.devices, capacities, policy.host_workers)
        self.victims = {
            device: Victims(self.arenas.spaces[device], self._stake) for device in graph.devices
        }
        self.unpinned: set[int] = set()
        """Devices with a block that may be dropped now, and could not be at the last look."""

    # ---- the walk -------------------------------------------------------------------------------

    def run(self) -> MemGraph:
        self._lay_out_the_start()
        alloc = execute = 0
        while execute < len(self.graph.tasks):
            ahead = alloc - execute
            if alloc < len(self.graph.tasks) and self._find_place(alloc, ahead):
                alloc += 1
            elif ahead == 0:
                self._pack(alloc)
                alloc += 1
            else:
                self._execute(execute)
                execute += 1
        return self._finish()

    def _lay_out_the_start(self) -> None:
        there = {*self.graph.outputs, *self.graph.kept, *self.homes}
        begin = [
            number
            for number, buffer in enumerate(self.graph.buffers)
            if (buffer.persistent or buffer.role is Role.INPUT)
            and (self.uses.is_used(number) or number in there)
        ]
        # The pieces of a tensor lie side by side. Inputs come last, as they leave a free rest.
        begin.sort(
            key=lambda b: (
                b not in self.homes,
                self.graph.buffers[b].role is Role.INPUT,
                self.graph.buffers[b].tensor,
                self.graph.buffers[b].start,
                b,
            )
        )
        for number in begin:
            self._settle(number)
        for device in self.victims:
            if small := scratch_bytes(self.graph, device):
                offset = self._take_at_start(device, small, "the scratch memory", None)
                self.layout.scratch[device] = Place(device, offset, small)

    def _settle(self, number: int) -> None:
        """Give a buffer that holds something before the step its place."""
        buffer, wanted = self.graph.buffers[number], self.homes.get(number)
        arena = buffer.device if number in self.policy.resident else HOST
        if wanted is not None:
            arena = wanted.arena
        size, offset = self.sizes[number], None if wanted is None else wanted.offset
        place = Place(arena, self._take_at_start(arena, size, buffer.name, offset), buffer.nbytes)
        self.layout.starts[number] = place
        copy = Copy(place, size, number, [], from_start=True)
        if arena == HOST:
            self.layout.on_host[number] = copy
            self.layout.host_valid.add(number)
        else:
            self.layout.on_device[number] = copy

    def _take_at_start(self, arena: int, size: int, name: str, offset: int | None) -> int:
        space = self.arenas.spaces[arena]
        # Nothing was freed yet, so the best fit is the lowest address, side by side with the
        # others.
        start = space.best_fit(size) if offset is None else offset
        if start is None:
            refuse_arena(arena, space.used + size, space.capacity, name)
        if start + size > space.capacity:
            # A home that another plan chose: the kernels of this graph allocate more beside it.
            refuse_arena(arena, start + size, space.capacity, name)
        space.take(start, size, name)
        return start

    # ---- places ---------------------------------------------------------------------------------

    def _find_place(self, number: int, ahead: int) -> bool:
        """Find places for all that a task needs, or for nothing."""
        task, touched = self.graph.tasks[number], self.uses.touched[number]
        if ahead > self.policy.place_ahead:
            return False
        if ahead and not self.layout.host_writes.isdisjoint(touched):
            return False  # the copy on the device will be out of date by then
        wanted = self._list_wanted(number)
        for b in touched:
            self.uses.pin(b)
        taken: list[tuple[Space, int, list[Piece]]] = []
        copies: dict[int | None, Copy] = {}
        for b, size in wanted:
            device = task.device if b is None else self.graph.buffers[b].device
            space = self.arenas.spaces[device]
            high = b is None or (b not in self.graph.outputs and self.uses.ends_soon(b, number))
            fixed = self.policy.offsets.get((number,) if b is None else b)
            offset = space.best_fit(size, high) if fixed is None else fixed
            if offset is None:
                offset = self._make_room(device, size, number, ahead)
            if offset is None:
                for space, offset, pieces in reversed(taken):
                    space.give(offset, pieces)
                for b in touched:
                    self.uses.unpin(b)
                return False
            pieces = space.take(offset, size, b)
            taken.append((space, offset, pieces))
            nbytes = task.workspace if b is None else self.graph.buffers[b].nbytes
            copies[b] = Copy(Place(device, offset, nbytes), size, b, pieces)
        self._settle_in(number, copies)
        return True

    def _list_wanted(self, number: int) -> list[tuple[int | None, int]]:
        """The operands that are not on its device, largest first; None stands for its workspace."""
        task = self.graph.tasks[number]
        if task.lane == "host":
            return []
        wanted: list[tuple[int | None, int]] = [
            (b, self.sizes[b])
            for b in self.uses.touched[number]
            if b not in self.layout.on_device and self.graph.buffers[b].device != HOST
        ]
        if task.workspace > SMALL_WORKSPACE:
            wanted.append((None, self.graph.align(task.workspace)))
        return sorted(wanted, key=lambda pair: -pair[1])

    def _settle_in(self, number: int, copies: Mapping[int | None, Copy]) -> None:
        task = self.graph.tasks[number]
        for b, copy in copies.items():
            if b is None:
                self.layout.workspaces[number] = copy
                continue
            self.layout.on_device[b] = copy
            if b in task.reads:
                self.nodes.copy(RELOAD, b, number, self.layout.on_host[b], copy)
        if task.lane == "host":
            self.layout.host_writes.update(task.writes)
        for b in self.uses.touched[number]:
            self.uses.advance(b)
            if b in self.layout.on_device and self._can_move(b):
                self._remember(b)

    # ---- eviction -------------------------------------------------------------------------------

    def _can_move(self, b: int) -> bool:
        return b not in self.layout.starts or self.layout.starts[b].arena == HOST

    def _make_room(self, device: int, size: int, number: int, ahead: int) -> int | None:
        """Evict the cheapest window that holds `size` bytes. Returns where it begins."""
        only_drop = ahead > self.policy.evict_ahead
        may_drop = ahead <= self.policy.drop_ahead and device in self.unpinned
        if only_drop and not may_drop:
            return None
        window = self.victims[device].find_window(
            size, self.clock[number], number if only_drop else None
        )
        if window is None:
            if only_drop:
                self.unpinned.discard(device)
            return None
        for start in window:
            owner = self.arenas.spaces[device].owner(start)
            if isinstance(owner, int):
                self._evict(owner, number)
        return window[0]

    def _remember(self, b: int) -> None:
        later = self.uses.next(b)
        is_overwritten = later != NEVER and b not in self.graph.tasks[later].reads
        is_clean = b in self.layout.host_valid or is_overwritten
        offset = self.layout.on_device[b].place.offset
        self.victims[self.graph.buffers[b].device].remember(b, later, offset, is_clean)

    def _stake(self, b: int) -> Stake | None:
        """What it costs to evict a buffer now; None if it cannot go."""
        if self.uses.is_pinned(b) or not self._can_move(b) or b not in self.layout.on_device:
            return None
        later = self.uses.next(b)
        reload = later != NEVER and b in self.graph.tasks[later].reads
        offload = b not in self.layout.host_valid and (reload or later == NEVER)
        until = self.clock[later] if later != NEVER else self.clock[-1]
        moved = self.graph.buffers[b].nbytes * (offload + reload)
        return Stake(later, until, moved, dropped=not offload)

    def _evict(self, b: int, number: int) -> None:
        """Take a buffer off its device. Copy it if it will be read and the host has no valid
        copy."""
        later = self.uses.next(b)
        is_needed = later == NEVER or b in self.graph.tasks[later].reads
        if is_needed and b not in self.layout.host_valid:
            self._offload(b, number)
        self._release(self.layout.on_device.pop(b))

    def _pack(self, number: int) -> None:
        """Place a task that finds no window: everything that can move goes, its own operands too,
        and they are laid side by side."""
        task = self.graph.tasks[number]
        devices = {self.graph.buffers[b].device for b in self.uses.touched[number]} - {HOST}
        for b in [b for b in self.layout.on_device if self.graph.buffers[b].device in devices]:
            if self._can_move(b):
                self._evict(b, number)
        if not self._find_place(number, 0):
            refuse(self.graph, self.capacities, task.device)

    # ---- nodes ----------------------------------------------------------------------------------

    def _offload(self, b: int, number: int) -> None:
        if b not in self.layout.on_host:
            self._take_host_copy(b)
        self.nodes.copy(OFFLOAD, b, number, self.layout.on_device[b], self.layout.on_host[b])
        self.layout.host_valid.add(b)

    def _take_host_copy(self, b: int) -> None:
        buffer = self.graph.buffers[b]
        self.layout.on_host[b] = self._take_on_host(buffer.nbytes, buffer.name, b)

    def _take_on_host(self, nbytes: int, name: str, b: int | None) -> Copy:
        size, space = self.graph.align(nbytes), self.arenas.spaces[HOST]
        offset = self.arenas.host.best_fit(size)
        if offset is None:
            refuse_arena(HOST, space.used + size, space.capacity, name)
        return Copy(Place(HOST, offset, nbytes), size, b, space.take(offset, size, b))

    def _execute(self, number: int) -> None:
        task = self.graph.tasks[number]
        host = task.lane == "host"
        copies = [self._find_operand(b, number, host) for b in self.uses.touched[number]]
        workspace = self.layout.workspaces.pop(number, None)
        if host and task.workspace:
            workspace = self._take_on_host(task.workspace, task.name, None)
        self.nodes.task(number, copies, workspace)
        if host:
            self.layout.host_writes.difference_update(task.writes)
            self._note_seconds(number, copies if workspace is None else [*copies, workspace])
        for b in self.uses.touched[number]:
            if b in task.writes:
                self._note_change(b, host)
        if workspace is not None:
            self._release(workspace)
        for b in self.uses.touched[number]:
            self.uses.unpin(b)
            self._release_after(b, number)

    def _note_seconds(self, number: int, copies: Sequence[Copy]) -> None:
        """Note how long a task of the host takes. Nothing follows the last one, which gets 0."""
        seconds = self.clock[min(number + 1, len(self.clock) - 1)] - self.clock[number]
        self.arenas.host.count_task(seconds)
        for copy in copies:
            copy.host_seconds += seconds

    def _find_operand(self, b: int, number: int, host: bool) -> Copy:
        if not host and self.graph.buffers[b].device != HOST:
            return self.layout.on_device[b]
        if b not in self.layout.on_host:
            self._take_host_copy(b)
        if b in self.graph.tasks[number].reads and b not in self.layout.host_valid:
            self._offload(b, number)
            if self._can_move(b):
                self._remember(b)
        return self.layout.on_host[b]

    def _note_change(self, b: int, host: bool) -> None:
        """Note that the other copy is out of date."""
        if host:
            self.layout.host_valid.add(b)
            if b in self.layout.on_device:
                self._release(self.layout.on_device.pop(b))
            return
        self.layout.host_valid.discard(b)
        if b in self.layout.on_host and b not in self.layout.starts:
            self._release(self.layout.on_host.pop(b))

    def _release_after(self, b: int, number: int) -> None:
        if self.uses.is_pinned(b) or not self._can_move(b):
            return
        if self.uses.next(b) != NEVER:
            if b in self.layout.host_valid:
                self.unpinned.add(self.graph.buffers[b].device)
            return
        on_device = b in self.layout.on_device
        if self.graph.buffers[b].persistent:
            if on_device:
                self._evict(b, number)
            return
        if b in self.graph.outputs:
            return
        if on_device:
            self._release(self.layout.on_device.pop(b))
        if b in self.layout.on_host:
            self._release(self.layout.on_host.pop(b))

    def _release(self, copy: Copy, to_end: bool = False) -> None:
        self.layout.blocks.append(
            Block(copy.place, copy.buffer, tuple(copy.nodes), copy.from_start, to_end)
        )
        if not to_end:
            self.arenas.give(copy)

    def _finish(self) -> MemGraph:
        for b in self.graph.outputs:
            copies = self.layout.on_host if b in self.layout.host_valid else self.layout.on_device
            self.layout.ends[b] = copies[b].place
        for copies in (self.layout.on_device, self.layout.on_host):
            for copy in copies.values():
                self._release(copy, to_end=True)
        arenas = {arena: space.used for arena, space in self.arenas.spaces.items()}
        return MemGraph(
            self.graph,
            self.nodes.nodes(),
            arenas,
            self.layout.starts,
            self.layout.ends,
            tuple(self.layout.blocks),
            self.layout.scratch,
        )
