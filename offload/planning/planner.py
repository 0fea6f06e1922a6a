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
from offload.graph.memgraph import OFFLOAD, RELOAD, SEND, SMALL_WORKSPACE, MemGraph, Place
from offload.graph.taskgraph import HOST, TaskGraph
from offload.planning.arena import Piece
from offload.planning.layout import DeviceWalk, Layout, lay_out_start
from offload.planning.node_list import Copy, NodeList
from offload.planning.policies import Policy
from offload.planning.refusal import refuse, refuse_arena
from offload.planning.victims import NEVER, Stake, find_writers_elsewhere


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
        self.nodes = NodeList(graph)
        self.layout = Layout(graph, capacities, policy.host_workers, self._stake)
        self.devices = self.layout.devices
        lay_out_start(self.layout, graph, policy.resident, homes)
        self.waits_for = find_writers_elsewhere(graph)

    # ---- the walk -------------------------------------------------------------------------------

    def run(self) -> MemGraph:
        execute = 0
        while execute < len(self.graph.tasks):
            device = self.devices[self.graph.tasks[execute].device]
            if self._place_next(execute, device):
                continue
            if device.ahead:
                self._execute(execute, device)
                device.executed += 1
                execute += 1
            else:
                self._pack(execute, device)
                device.placed += 1
        return self._finish()

    def _place_next(self, execute: int, first: DeviceWalk) -> bool:
        """Find the places of the next task of a device, of `first` before others."""
        for device in (first, *self.devices.values()):
            if device.resumes > execute or device.placed == len(device.tasks):
                continue
            number = device.tasks[device.placed]
            if self.waits_for[number] >= execute:
                device.resumes = self.waits_for[number] + 1
            elif self._find_place(number, device):
                device.placed += 1
                return True
            else:
                device.resumes = device.tasks[device.executed] + 1 if device.ahead else number
        return False

    # ---- places ---------------------------------------------------------------------------------

    def _find_place(self, number: int, device: DeviceWalk) -> bool:
        """Find places for all that a task needs, or for nothing."""
        task, ahead, uses, space = self.graph.tasks[number], device.ahead, device.uses, device.space
        if ahead > self.policy.place_ahead:
            return False
        wanted = self._list_wanted(number, device)
        for b in task.touches:
            uses.pin(b)
        taken: list[tuple[int, list[Piece]]] = []
        copies: dict[int | None, Copy] = {}
        for b, size in wanted:
            high = b is None or (b not in self.graph.outputs and uses.ends_soon(b, number))
            fixed = self.policy.offsets.get((number,) if b is None else b)
            offset = space.best_fit(size, high) if fixed is None else fixed
            if offset is None:
                offset = self._make_room(device, size, number)
            if offset is None:
                for offset, pieces in reversed(taken):
                    space.give(offset, pieces)
                for b in task.touches:
                    uses.unpin(b)
                return False
            pieces = space.take(offset, size, b)
            taken.append((offset, pieces))
            nbytes = task.workspace if b is None else self.graph.buffers[b].nbytes
            copies[b] = Copy(Place(device.number, offset, nbytes), size, b, pieces)
        self._settle_in(number, device, copies)
        return True

    def _list_wanted(self, number: int, device: DeviceWalk) -> list[tuple[int | None, int]]:
        """The operands that are not on its device, largest first; None stands for its workspace."""
        task = self.graph.tasks[number]
        if task.lane == "host":
            return []
        wanted: list[tuple[int | None, int]] = [
            (b, self.sizes[b]) for b in task.touches if b not in device.copies
        ]
        if task.workspace > SMALL_WORKSPACE:
            wanted.append((None, self.graph.align(task.workspace)))
        return sorted(wanted, key=lambda pair: -pair[1])

    def _settle_in(
        self, number: int, device: DeviceWalk, copies: Mapping[int | None, Copy]
    ) -> None:
        task = self.graph.tasks[number]
        for b, copy in copies.items():
            if b is None:
                self.layout.workspaces[number] = copy
                continue
            device.copies[b] = copy
            if b in task.reads:
                self._copy_in(b, device, number)
        for b in task.touches:
            device.uses.advance(b)
            if b in device.copies and self.layout.can_move(b, device):
                self._remember(b, device)

    # ---- eviction -------------------------------------------------------------------------------

    def _is_needed(self, b: int) -> bool:
        """Whether the content of a buffer is read before it is overwritten, or is to be kept. A
        placed task of the host takes it when it runs."""
        if any(d.uses.is_pinned(b) and b not in d.copies for d in self.devices.values()):
            return True
        later = min(device.uses.next(b) for device in self.devices.values())
        return later == NEVER or b in self.graph.tasks[later].reads

    def _make_room(self, device: DeviceWalk, size: int, number: int) -> int | None:
        """Evict the cheapest window that holds `size` bytes. Returns where it begins."""
        only_drop = device.ahead > self.policy.evict_ahead
        may_drop = device.ahead <= self.policy.drop_ahead and device.may_drop
        if only_drop and not may_drop:
            return None
        window = device.victims.find_window(size, self.clock[number], number if only_drop else None)
        if window is None:
            if only_drop:
                device.may_drop = False
            return None
        for start in window:
            owner = device.space.owner(start)
            if isinstance(owner, int):
                self._evict(owner, device, number)
        return window[0]

    def _remember(self, b: int, device: DeviceWalk) -> None:
        later = device.uses.next(b)
        is_overwritten = later != NEVER and b not in self.graph.tasks[later].reads
        is_clean = is_overwritten or self.layout.is_elsewhere(b, device)
        device.victims.remember(b, later, device.copies[b].place.offset, is_clean)

    def _stake(self, number: int, b: int) -> Stake | None:
        """What it costs to evict a buffer from a device now; None if it cannot go."""
        device = self.devices[number]
        if (
            device.uses.is_pinned(b)
            or b not in device.copies
            or not self.layout.can_move(b, device)
        ):
            return None
        later = device.uses.next(b)
        reload = later != NEVER and b in self.graph.tasks[later].reads
        offload = not self.layout.is_elsewhere(b, device) and self._is_needed(b)
        until = self.clock[later] if later != NEVER else self.clock[-1]
        moved = self.graph.buffers[b].nbytes * (offload + reload)
        return Stake(later, until, moved, dropped=not offload)

    def _evict(self, b: int, device: DeviceWalk, number: int) -> None:
        """Take a buffer off its device. Copy it to the host if it will be read and nobody else has
        it."""
        if self._is_needed(b) and not self.layout.is_elsewhere(b, device):
            self._offload(b, device, number)
        self.layout.release(device.pop(b))

    def _pack(self, number: int, device: DeviceWalk) -> None:
        """Place a task that finds no window: everything that can move goes, its own operands too,
        and they are laid side by side."""
        for b in list(device.copies):
            if self.layout.can_move(b, device):
                self._evict(b, device, number)
        if not self._find_place(number, device):
            refuse(self.graph, self.capacities, device.number)

    # ---- nodes ----------------------------------------------------------------------------------

    def _copy_in(self, b: int, device: DeviceWalk, number: int) -> None:
        """Fill a copy from the host, or else from another device."""
        target = device.copies[b]
        if b in self.layout.host_valid:
            self.nodes.copy(RELOAD, b, number, self.layout.on_host[b], target)
        else:
            source = next(other for other in self.devices.values() if b in other.filled)
            self.nodes.copy(SEND, b, number, source.copies[b], target)
            if self.layout.can_move(b, source):
                self._remember(b, source)
        device.filled.add(b)

    def _offload(self, b: int, device: DeviceWalk, number: int) -> None:
        if b not in self.layout.on_host:
            self._host_copy(b)
        self.nodes.copy(OFFLOAD, b, number, device.copies[b], self.layout.on_host[b])
        self.layout.host_valid.add(b)

    def _host_copy(self, b: int) -> None:
        buffer = self.graph.buffers[b]
        self.layout.on_host[b] = self._on_host(buffer.nbytes, buffer.name, b)

    def _on_host(self, nbytes: int, name: str, b: int | None) -> Copy:
        size, space = self.graph.align(nbytes), self.layout.spaces[HOST]
        offset = self.layout.host.best_fit(size)
        if offset is None:
            refuse_arena(HOST, space.used + size, space.capacity, name)
        return Copy(Place(HOST, offset, nbytes), size, b, space.take(offset, size, b))

    def _execute(self, number: int, device: DeviceWalk) -> None:
        task = self.graph.tasks[number]
        host = task.lane == "host"
        copies = [self._host_operand(b, number) if host else device.copies[b] for b in task.touches]
        workspace = self.layout.workspaces.pop(number, None)
        if host and task.workspace:
            workspace = self._on_host(task.workspace, task.name, None)
        self.nodes.task(number, copies, workspace)
        if host:
            self._note_host_work(number, copies if workspace is None else [*copies, workspace])
        for b in task.writes:
            self._note_change(b, None if host else device)
        if workspace is not None:
            self.layout.release(workspace)
        for b in task.touches:
            device.uses.unpin(b)
            self._after_use(b, device, number)

    def _note_host_work(self, number: int, copies: Sequence[Copy]) -> None:
        """Note how long a task of the host takes. Nothing follows the last one, which gets 0."""
        seconds = self.clock[min(number + 1, len(self.clock) - 1)] - self.clock[number]
        self.layout.host.count_task(seconds)
        for copy in copies:
            copy.host_seconds += seconds

    def _host_operand(self, b: int, number: int) -> Copy:
        if b not in self.layout.on_host:
            self._host_copy(b)
        if b in self.graph.tasks[number].reads and b not in self.layout.host_valid:
            source = next(device for device in self.devices.values() if b in device.filled)
            self._offload(b, source, number)
            for device in self.devices.values():
                if b in device.copies and self.layout.can_move(b, device):
                    self._remember(b, device)
        return self.layout.on_host[b]

    def _note_change(self, b: int, device: DeviceWalk | None) -> None:
        """Note that a device, or the host, has written a buffer, so that other copies are out of
        date."""
        for other in self.devices.values():
            if other is not device and b in other.copies:
                self.layout.release(other.pop(b))
        if device is None:
            self.layout.host_valid.add(b)
            return
        device.filled.add(b)
        self.layout.host_valid.discard(b)
        if b in self.layout.on_host and b not in self.layout.starts:
            self.layout.release(self.layout.on_host.pop(b))

    def _after_use(self, b: int, device: DeviceWalk, number: int) -> None:
        if device.uses.is_pinned(b) or not self.layout.can_move(b, device):
            return
        if device.uses.next(b) != NEVER:
            if self.layout.is_elsewhere(b, device):
                device.may_drop = True
            return
        if self._is_awaited(b, device):
            if b in device.copies and self.layout.is_elsewhere(b, device):
                self.layout.release(device.pop(b))
            return
        if self.graph.buffers[b].persistent:
            for other in self.devices.values():
                if b in other.copies and self.layout.can_move(b, other):
                    self._evict(b, other, number)
            return
        if b in self.graph.outputs:
            return
        for other in self.devices.values():
            if b in other.copies:
                self.layout.release(other.pop(b))
        if b in self.layout.on_host:
            self.layout.release(self.layout.on_host.pop(b))

    def _is_awaited(self, b: int, device: DeviceWalk) -> bool:
        """Whether another device has yet to use a buffer."""
        return any(
            other.uses.is_pinned(b) or other.uses.next(b) != NEVER
            for other in self.devices.values()
            if other is not device
        )

    def _finish(self) -> MemGraph:
        for b in self.graph.outputs:
            filled = [device.copies[b] for device in self.devices.values() if b in device.filled]
            copy = self.layout.on_host[b] if b in self.layout.host_valid else filled[0]
            self.layout.ends[b] = copy.place
        for copies in (*[d.copies for d in self.devices.values()], self.layout.on_host):
            for copy in copies.values():
                self.layout.release(copy, to_end=True)
        arenas = {arena: space.used for arena, space in self.layout.spaces.items()}
        return MemGraph(
            self.graph,
            self.nodes.nodes(),
            arenas,
            self.layout.starts,
            self.layout.ends,
            tuple(self.layout.blocks),
            self.layout.scratch,
        )
