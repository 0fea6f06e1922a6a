"""Decides which node is enqueued next on which stream, and what its stream waits for. Pure.

    F1 F2 F3 |F4 F5     of a stream, at most `depth` nodes are enqueued and not known to be
    W5       |W6        complete, until only one stream has nodes left

A window also limits their seconds: whoever wants the device in the middle of a step waits for what
is enqueued. A node that takes longer than the window is enqueued alone.

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
from dataclasses import dataclass, field
from heapq import heappop, heappush

DEPTH = 6
"""How many nodes of a stream are enqueued at most. 2 are enough behind PCIe, 4 to 8 where launches
cost as much as kernels. With many more, the order is fixed too early."""


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """What stays the same from step to step. Lanes are given by their index in `lanes`."""

    lanes: tuple[str, ...]
    lane_of: Sequence[int]
    """The lane of every node."""
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
    def from_lanes(
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
    node_seconds: Sequence[float]
    """By node: the seconds that it is predicted to take."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One lane: what may be enqueued, and what is enqueued and not known to be complete."""

    room: int
    """How many more nodes it takes."""
    behind: list[int]
    """[other]: the position in the other stream up to which this stream comes after it."""
    unissued: int = 0
    unmarked: int = 0
    """Nodes since the last mark."""
    ahead: float = 0.0
    """The seconds of what is enqueued and not known to be complete."""
    length: int = 0
    finished: int = 0
    """The position up to which all is known to be complete."""
    ready: list[int] = field(default_factory=list)
    """A heap of the ranks of nodes that wait for nothing."""
    early: list[int] = field(default_factory=list)
    """A heap of the ranks of nodes that may be enqueued; some may be ready by now."""
    queued: deque[int] = field(default_factory=deque)
    marks: deque[int] = field(default_factory=deque)


class _NodeStates:
    """How far each node of the step is."""

    def __init__(self, chart: Chart) -> None:
        count = len(chart.lane_of)
        self.blocked = list(chart.waits)
        """How many nodes it waits for before it may be enqueued."""
        self.waiting = list(chart.waits)
        """How many nodes it would wait for on the device."""
        self.issued = [False] * count
        self.position = [0] * count
        """Its position in its stream, from 1 on."""
        self.sequence = [0] * count
        """Its position among all that were enqueued."""
        self.behind: dict[int, tuple[int, ...]] = {}
        """Of a marked node: what its stream comes after (`_Stream.behind`)."""


class Issue:
    """The order of one step. Call `next` until it is None, then `complete` what is complete, and
    repeat until nothing is unissued."""

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
        count = len(chart.lane_of)
        most = count + 1 if depth is None else depth
        self._chart = chart
        self._rank = range(count) if rank is None else rank
        self._node_of = sorted(range(count), key=self._rank.__getitem__)
        self._streams = [
            _Stream((workers or {}).get(name, 1) if host else most, [0] * len(chart.lanes))
            for name, host in zip(chart.lanes, chart.on_host, strict=True)
        ]
        self._nodes = _NodeStates(chart)
        self._alone = False
        """Whether all nodes that are left are of one stream. Then only the rank matters."""
        self._mark_every = max(1, most // 2)
        self._window = window
        self._total = 0
        for lane in chart.lane_of:
            self._streams[lane].unissued += 1
        self._heads: list[tuple[int, int, int]] = []
        """A heap of what a stream would take next: whether it would wait, the rank, the lane. All
        that may be enqueued is there, and entries that hold no longer, too."""
        for node, waits in enumerate(chart.waits):
            if not waits:
                self._push_ready(node)

    @property
    def unissued(self) -> int:
        return len(self._node_of) - self._total

    def under_way(self) -> list[int]:
        """Nodes that are enqueued and not known to be complete."""
        return [node for stream in self._streams for node in stream.queued]

    def marks(self) -> list[int]:
        """For each stream, the next node whose event the host may ask for."""
        return [stream.marks[0] for stream in self._streams if stream.marks]

    def next(self) -> Issued | None:
        """The node to enqueue now; None if the host must wait until something is complete."""
        while self._heads:
            head = heappop(self._heads)
            waits, rank, lane = head
            stream = self._streams[lane]
            if head == self._head(lane) and self._has_room(lane, stream):
                heappop(stream.early if waits else stream.ready)
                issued = self._issue(self._node_of[rank], lane)
                self._offer(lane)
                return issued
        return None

    def _offer(self, lane: int) -> None:
        """Have the stream's next node among those that may be enqueued."""
        if (head := self._head(lane)) and self._has_room(lane, self._streams[lane]):
            heappush(self._heads, head)

    def _head(self, lane: int) -> tuple[int, int, int] | None:
        stream = self._streams[lane]
        if stream.ready:
            return 0, stream.ready[0], lane
        early = stream.early
        while early and not self._nodes.waiting[self._node_of[early[0]]]:
            heappop(early)  # it is ready by now
        return (1, early[0], lane) if early else None

    def _push_ready(self, node: int) -> None:
        lane, rank = self._chart.lane_of[node], self._rank[node]
        ready = self._streams[lane].ready
        heappush(ready, rank)
        if ready[0] == rank:
            self._offer(lane)

    def _has_room(self, lane: int, stream: _Stream) -> bool:
        if self._window is None or self._chart.on_host[lane]:
            return stream.room > 0 or self._alone
        return stream.room > 0 and stream.ahead < self._window.seconds

    def _issue(self, node: int, lane: int) -> Issued:
        chart, nodes, stream = self._chart, self._nodes, self._streams[lane]
        nodes.issued[node] = True
        self._total += 1
        nodes.sequence[node] = self._total
        stream.room -= 1
        stream.unissued -= 1
        if not stream.unissued or self._total == 1:
            rest = [e for e, other in enumerate(self._streams) if other.unissued]
            self._alone = self._alone or (len(rest) == 1 and not chart.on_host[rest[0]])
            self._alone = self._alone and self._window is None
            for other in rest if self._alone else ():
                self._offer(other)
        if chart.on_host[lane]:
            return Issued(node, (), False)
        waits = self._waits(node, stream) if chart.deps[node] else ()
        stream.length += 1
        nodes.position[node] = stream.behind[lane] = stream.length
        stream.queued.append(node)
        stream.unmarked += 1
        often = stream.unmarked >= self._mark_every and not self._alone
        if self._window is not None:
            stream.ahead += self._window.node_seconds[node]
            often = often or stream.ahead >= self._window.seconds
        mark = chart.awaited[node] or often
        if mark:
            stream.unmarked = 0
            stream.marks.append(node)
            nodes.behind[node] = tuple(stream.behind)
        for after in chart.successors[node]:
            if not chart.on_host[chart.lane_of[after]]:
                self._unblock(after)
        return Issued(node, waits, mark)

    def _waits(self, node: int, stream: _Stream) -> Sequence[int]:
        """The nodes to wait for, the last enqueued first, as it may have waited for the others."""
        chart, nodes, behind = self._chart, self._nodes, stream.behind
        waits: list[int] = []
        for dep in sorted(chart.deps[node], key=nodes.sequence.__getitem__, reverse=True):
            other, position = chart.lane_of[dep], nodes.position[dep]
            if position > behind[other] and position > self._streams[other].finished:
                waits.append(dep)
                behind[:] = map(max, behind, nodes.behind[dep])
        return waits

    def _unblock(self, node: int) -> None:
        nodes = self._nodes
        nodes.blocked[node] -= 1
        if not nodes.blocked[node] and nodes.waiting[node]:
            lane = self._chart.lane_of[node]
            heappush(self._streams[lane].early, self._rank[node])
            self._offer(lane)

    def complete(self, node: int) -> None:
        """Note that a host task is complete, or that the event of a marked node is: then everything
        before it in its stream is complete, too."""
        lane = self._chart.lane_of[node]
        stream, position = self._streams[lane], self._nodes.position
        if self._chart.on_host[lane]:
            self._end(node, lane)
            self._offer(lane)
            return
        while stream.queued and position[stream.queued[0]] <= position[node]:
            done = stream.queued.popleft()
            if self._window is not None:
                stream.ahead -= self._window.node_seconds[done]
            self._end(done, lane)
        if not stream.queued:
            stream.ahead = 0.0  # rounding may have left a little
        while stream.marks and position[stream.marks[0]] <= position[node]:
            stream.marks.popleft()
        stream.finished = max(stream.finished, position[node])
        self._offer(lane)

    def _end(self, node: int, lane: int) -> None:
        chart, nodes = self._chart, self._nodes
        self._streams[lane].room += 1
        for after in chart.successors[node]:
            nodes.waiting[after] -= 1
            if chart.on_host[lane] or chart.on_host[chart.lane_of[after]]:
                self._unblock(after)
            if not nodes.waiting[after] and not nodes.issued[after]:
                self._push_ready(after)
