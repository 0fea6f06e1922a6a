"""Decides which node is enqueued next on which stream, and what its stream waits for. Pure.

    F1 F2 F3 |F4 F5     enqueued but not known to be complete: at most `depth` a stream, until
    W5       |W6        only nodes of one stream are left; with a window never more than it

A window is a number of seconds: whoever wants the device in the middle of a step waits for what is
enqueued. A stream that has a longer node than the window has that one alone.

A node may be enqueued when everything that it waits for is enqueued; its stream then waits on the
device. Nodes that would wait for nothing come first, then the smallest rank. A node of a host
lane begins when everything that it waits for is complete, and so does a node that waits for a
host node.

    waits   an event of another stream, unless the order of this stream, or earlier waits of the
            two streams, imply it: the transitive reduction of what was enqueued
    mark    the node has an event, because another stream or the host will wait for it; now and
            then another node gets one, so that the host sees how far a stream is

Every order of enqueuing keeps `deps`, so no stream ever waits for what is enqueued later. So there
is no deadlock, whichever lane is fast or slow.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

DEPTH = 6
"""2 is enough behind PCIe, 4 to 8 where launches cost as much as kernels. With many more, the order
is fixed too early."""


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """What stays the same from step to step. Lanes are given by their index in `lanes`."""

    lanes: tuple[str, ...]
    lane_of: Sequence[int]
    """The lane_of of every node."""
    on_host: Sequence[bool]
    """Whether a lane is one of the host, by lane."""
    deps: Sequence[Sequence[int]]
    """What a node waits for on other streams. Only these can need an event."""
    successors: Sequence[Sequence[int]]
    awaited: Sequence[bool]
    """Whether a node has a successor on another stream or on the host."""
    waits: Sequence[int]
    """The number of nodes that a node waits for."""

    @classmethod
    def of(
        cls, lanes: Sequence[str], successors: Sequence[Sequence[int]], host: Collection[str]
    ) -> "Chart":
        """`lanes` of all nodes; `host`: the lanes that are no streams."""
        names = tuple(dict.fromkeys(lanes))
        lane_of = [names.index(name) for name in lanes]
        on_host = [name in host for name in names]
        deps: list[list[int]] = [[] for _ in lanes]
        waits = [0] * len(lanes)
        awaited = [False] * len(lanes)
        for node, after in enumerate(successors):
            for later in after:
                waits[later] += 1
                if lane_of[later] != lane_of[node] and not on_host[lane_of[node]]:
                    awaited[node] = True
                    if not on_host[lane_of[later]]:
                        deps[later].append(node)
        return cls(names, lane_of, on_host, deps, successors, awaited, waits)


@dataclass(frozen=True, slots=True)
class Issued:
    """A node that is now enqueued, or given to a thread of the host."""

    node: int
    waits: Sequence[int]
    """Nodes whose events its stream waits for first."""
    mark: bool
    """Whether an event is recorded behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class RunAhead:
    """How far a stream may be ahead of what is known to be complete."""

    seconds: float
    of: Sequence[float]
    """By node: the seconds that it is predicted to take."""


class Issue:
    """The order of one step. Call `next` until it is None, then `complete` what is complete, and
    repeat until `over`."""

    def __init__(
        self,
        chart: Chart,
        depth: int | None = DEPTH,
        workers: Mapping[str, int] | None = None,
        rank: Sequence[int] | None = None,
        window: RunAhead | None = None,
    ) -> None:
        """`depth` None: enqueue everything without looking at the device. `workers`: how many nodes
        a host lane runs at a time. `rank`: the rank of every node, a permutation. `window`: the
        seconds that a stream may be ahead; None: any."""
        count, streams = len(chart.lane_of), len(chart.lanes)
        most = count + 1 if depth is None else depth
        self._chart = chart
        self._rank = range(count) if rank is None else rank
        self._node_of = sorted(range(count), key=self._rank.__getitem__)
        self._unissued = [0] * streams
        for lane in chart.lane_of:
            self._unissued[lane] += 1
        self._alone = False
        """Whether all nodes that are left are of one stream. Then only the rank matters."""
        self._room = [
            (workers or {}).get(name, 1) if host else most
            for name, host in zip(chart.lanes, chart.on_host, strict=True)
        ]
        self._mark_every = max(1, most // 2)
        self._unmarked = [0] * streams
        self._window = window
        self._ahead = [0.0] * streams
        """By lane: the seconds of what is enqueued and not known to be complete."""
        self._blocked = list(chart.waits)
        """By node: how many nodes it waits for before it may be enqueued."""
        self._waiting = list(chart.waits)
        """By node: how many nodes it would wait for on the device."""
        self._ready: list[list[int]] = [[] for _ in range(streams)]
        """By lane: a heap of the ranks of nodes that wait for nothing."""
        self._early: list[list[int]] = [[] for _ in range(streams)]
        """By lane: a heap of the ranks of nodes that may be enqueued; some may be ready by now."""
        self._queued: list[deque[int]] = [deque() for _ in range(streams)]
        self._marks: list[deque[int]] = [deque() for _ in range(streams)]
        self._issued = [False] * count
        self._position = [0] * count
        """By node: its position in its stream, from 1 on."""
        self._sequence = [0] * count
        """By node: its position among all that were enqueued."""
        self._behind = [[0] * streams for _ in range(streams)]
        """[stream][other]: the position in the other stream up to which this stream comes after
        it."""
        self._before: dict[int, tuple[int, ...]] = {}
        """The same at every marked node."""
        self._finished = [0] * streams
        self._lengths = [0] * streams
        self._total = 0
        for node, waits in enumerate(self._blocked):
            if not waits:
                heappush(self._ready[chart.lane_of[node]], self._rank[node])

    @property
    def unissued(self) -> int:
        return len(self._issued) - self._total

    def under_way(self) -> list[int]:
        """Nodes that are enqueued and not known to be complete."""
        return [node for queued in self._queued for node in queued]

    def marks(self) -> list[int]:
        """For each stream, the next node whose event the host may ask for."""
        return [marks[0] for marks in self._marks if marks]

    def next(self) -> Issued | None:
        """The node to enqueue now; None if the host must wait until something is complete."""
        best, chosen = (2, 0), -1
        for lane, room in enumerate(self._room):
            if not self._has_room(lane, room):
                continue
            if (ready := self._ready[lane]) and (0, ready[0]) < best:
                best, chosen = (0, ready[0]), lane
            elif best[0] and (rank := self._earliest(lane)) is not None and (1, rank) < best:
                best, chosen = (1, rank), lane
        if chosen < 0:
            return None
        heappop((self._early if best[0] else self._ready)[chosen])
        return self._issue(self._node_of[best[1]], chosen)

    def _has_room(self, lane: int, room: int) -> bool:
        if self._window is None or self._chart.on_host[lane]:
            return room > 0 or self._alone
        return room > 0 and self._ahead[lane] < self._window.seconds

    def _earliest(self, lane: int) -> int | None:
        early = self._early[lane]
        while early and not self._waiting[self._node_of[early[0]]]:
            heappop(early)  # it is ready by now
        return early[0] if early else None

    def _issue(self, node: int, lane: int) -> Issued:
        chart = self._chart
        self._issued[node] = True
        self._total += 1
        self._sequence[node] = self._total
        self._room[lane] -= 1
        self._unissued[lane] -= 1
        if not self._unissued[lane] or self._total == 1:
            rest = [e for e, count in enumerate(self._unissued) if count]
            self._alone = self._alone or (len(rest) == 1 and not chart.on_host[rest[0]])
            self._alone = self._alone and self._window is None
        if chart.on_host[lane]:
            return Issued(node, (), False)
        waits = self._waits(node, lane) if chart.deps[node] else ()
        self._lengths[lane] += 1
        behind = self._behind[lane]
        self._position[node] = behind[lane] = self._lengths[lane]
        self._queued[lane].append(node)
        self._unmarked[lane] += 1
        often = self._unmarked[lane] >= self._mark_every and not self._alone
        if self._window is not None:
            self._ahead[lane] += self._window.of[node]
            often = often or self._ahead[lane] >= self._window.seconds
        mark = chart.awaited[node] or often
        if mark:
            self._unmarked[lane] = 0
            self._marks[lane].append(node)
            self._before[node] = tuple(behind)
        for after in chart.successors[node]:
            if not chart.on_host[chart.lane_of[after]]:
                self._unblock(after)
        return Issued(node, waits, mark)

    def _waits(self, node: int, lane: int) -> Sequence[int]:
        """The nodes to wait for, the last enqueued first, as it may have waited for the others."""
        chart, behind = self._chart, self._behind[lane]
        found: list[int] = []
        for dep in sorted(chart.deps[node], key=self._sequence.__getitem__, reverse=True):
            other, position = chart.lane_of[dep], self._position[dep]
            if position > behind[other] and position > self._finished[other]:
                found.append(dep)
                behind[:] = map(max, behind, self._before[dep])
        return found

    def _unblock(self, node: int) -> None:
        self._blocked[node] -= 1
        if not self._blocked[node] and self._waiting[node]:
            heappush(self._early[self._chart.lane_of[node]], self._rank[node])

    def complete(self, node: int) -> None:
        """Note that a host task is complete, or that the event of a marked node is: then everything
        before it in its stream is complete, too."""
        lane = self._chart.lane_of[node]
        if self._chart.on_host[lane]:
            self._end(node, lane)
            return
        queued = self._queued[lane]
        while queued and self._position[queued[0]] <= self._position[node]:
            done = queued.popleft()
            if self._window is not None:
                self._ahead[lane] -= self._window.of[done]
            self._end(done, lane)
        if not queued:
            self._ahead[lane] = 0.0  # what is left of sums of other numbers
        marks = self._marks[lane]
        while marks and self._position[marks[0]] <= self._position[node]:
            marks.popleft()
        self._finished[lane] = max(self._finished[lane], self._position[node])

    def _end(self, node: int, lane: int) -> None:
        chart = self._chart
        self._room[lane] += 1
        for after in chart.successors[node]:
            self._waiting[after] -= 1
            if chart.on_host[lane] or chart.on_host[chart.lane_of[after]]:
                self._blocked[after] -= 1
                if not self._blocked[after] and self._waiting[after]:
                    heappush(self._early[chart.lane_of[after]], self._rank[after])
            if not self._waiting[after] and not self._issued[after]:
                heappush(self._ready[chart.lane_of[after]], self._rank[after])
