"""Which node is enqueued next on which stream, and what its stream waits for. Pure.

    F1 F2 F3 |F4 F5     enqueued, not known to be complete: at most `depth` a stream, until
    W5       |W6        all that are left are of one stream

A node may be enqueued when all that it waits for is enqueued: its stream then waits for the rest,
on the device. Those that would wait for nothing come first, then the smallest rank. A node of a
host engine begins when all that it waits for is complete, and so does what waits for it.

    waits   an event of another stream, if neither the order of this stream nor what either of them
            has waited for before says it already: the transitive reduction of what was enqueued
    mark    the node has an event: somebody on another stream, or the host, will wait for it; and
            now and then one, by which the host sees how far a stream is

Every order of enqueuing keeps `deps`, so no stream ever waits for what is enqueued later: there is
no deadlock, whoever is fast or slow.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

DEPTH = 6
"""2 is enough behind PCIe, 4 to 8 where launches cost as much as kernels; many more commit to an
order too early."""


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """What of some work does not change from step to step. Engines by their index in `engines`."""

    engines: tuple[str, ...]
    engine: Sequence[int]
    """Of every node."""
    on_host: Sequence[bool]
    """By engine."""
    deps: Sequence[Sequence[int]]
    """What a node waits for, on streams other than its own: no other can need an event."""
    successors: Sequence[Sequence[int]]
    awaited: Sequence[bool]
    """Whether a node has a successor on another stream, or on the host."""
    waits: Sequence[int]
    """For how many a node waits."""

    @classmethod
    def of(
        cls, engines: Sequence[str], successors: Sequence[Sequence[int]], host: Collection[str]
    ) -> "Chart":
        """`engines` of all nodes; `host`: those that are no streams."""
        names = tuple(dict.fromkeys(engines))
        engine = [names.index(name) for name in engines]
        on_host = [name in host for name in names]
        deps: list[list[int]] = [[] for _ in engines]
        waits = [0] * len(engines)
        awaited = [False] * len(engines)
        for node, after in enumerate(successors):
            for later in after:
                waits[later] += 1
                if engine[later] != engine[node] and not on_host[engine[node]]:
                    awaited[node] = True
                    if not on_host[engine[later]]:
                        deps[later].append(node)
        return cls(names, engine, on_host, deps, successors, awaited, waits)


@dataclass(frozen=True, slots=True)
class Issued:
    """One node that is enqueued now, or given to a thread of the host."""

    node: int
    waits: Sequence[int]
    """Nodes whose events its stream waits for before."""
    mark: bool
    """Its event is recorded behind it."""


class Issue:
    """Of one step. `next` until it is None, then say what is `complete`, and so on until `over`."""

    def __init__(
        self,
        chart: Chart,
        depth: int | None = DEPTH,
        workers: Mapping[str, int] | None = None,
        rank: Sequence[int] | None = None,
    ) -> None:
        """`depth` None: the host looks at nothing, and all is enqueued at once. `workers`: how many
        nodes a host engine runs at a time. `rank`: of every node, a permutation."""
        count, streams = len(chart.engine), len(chart.engines)
        most = count + 1 if depth is None else depth
        self._chart = chart
        self._rank = range(count) if rank is None else rank
        self._node_of = sorted(range(count), key=self._rank.__getitem__)
        self._unissued = [0] * streams
        for engine in chart.engine:
            self._unissued[engine] += 1
        self._alone = False
        """All that are left are of one stream: whatever is known, its order is by rank."""
        self._room = [
            (workers or {}).get(name, 1) if host else most
            for name, host in zip(chart.engines, chart.on_host, strict=True)
        ]
        self._mark_every = max(1, most // 2)
        self._unmarked = [0] * streams
        self._blocked = list(chart.waits)
        """For how many a node waits before it may be enqueued."""
        self._waiting = list(chart.waits)
        """For how many of them on the device then."""
        self._ready: list[list[int]] = [[] for _ in range(streams)]
        """Ranks, a heap an engine: of those that wait for nothing."""
        self._early: list[list[int]] = [[] for _ in range(streams)]
        """Of those that may be enqueued; some of them are ready by now."""
        self._queued: list[deque[int]] = [deque() for _ in range(streams)]
        self._marks: list[deque[int]] = [deque() for _ in range(streams)]
        self._issued = [False] * count
        self._position = [0] * count
        """In its stream, from 1 on."""
        self._sequence = [0] * count
        """Among all that were enqueued."""
        self._behind = [[0] * streams for _ in range(streams)]
        """[stream][other]: up to which position of the other a stream comes after it."""
        self._before: dict[int, tuple[int, ...]] = {}
        """The same of every marked node."""
        self._finished = [0] * streams
        self._lengths = [0] * streams
        self._total = 0
        for node, waits in enumerate(self._blocked):
            if not waits:
                heappush(self._ready[chart.engine[node]], self._rank[node])

    @property
    def unissued(self) -> int:
        return len(self._issued) - self._total

    def under_way(self) -> list[int]:
        """Enqueued, and not known to be complete."""
        return [node for queued in self._queued for node in queued]

    def marks(self) -> list[int]:
        """Of every stream the next node whose event the host may ask for."""
        return [marks[0] for marks in self._marks if marks]

    def next(self) -> Issued | None:
        """What to enqueue now; None: the host must wait until something is complete."""
        best, chosen = (2, 0), -1
        for engine, room in enumerate(self._room):
            if room <= 0 and not self._alone:
                continue
            if (ready := self._ready[engine]) and (0, ready[0]) < best:
                best, chosen = (0, ready[0]), engine
            elif best[0] and (rank := self._earliest(engine)) is not None and (1, rank) < best:
                best, chosen = (1, rank), engine
        if chosen < 0:
            return None
        heappop((self._early if best[0] else self._ready)[chosen])
        return self._issue(self._node_of[best[1]], chosen)

    def _earliest(self, engine: int) -> int | None:
        early = self._early[engine]
        while early and not self._waiting[self._node_of[early[0]]]:
            heappop(early)  # ready by now
        return early[0] if early else None

    def _issue(self, node: int, engine: int) -> Issued:
        chart = self._chart
        self._issued[node] = True
        self._total += 1
        self._sequence[node] = self._total
        self._room[engine] -= 1
        self._unissued[engine] -= 1
        if not self._unissued[engine] or self._total == 1:
            rest = [e for e, count in enumerate(self._unissued) if count]
            self._alone = self._alone or (len(rest) == 1 and not chart.on_host[rest[0]])
        if chart.on_host[engine]:
            return Issued(node, (), False)
        waits = self._waits(node, engine) if chart.deps[node] else ()
        self._lengths[engine] += 1
        behind = self._behind[engine]
        self._position[node] = behind[engine] = self._lengths[engine]
        self._queued[engine].append(node)
        self._unmarked[engine] += 1
        often = self._unmarked[engine] >= self._mark_every and not self._alone
        mark = chart.awaited[node] or often
        if mark:
            self._unmarked[engine] = 0
            self._marks[engine].append(node)
            self._before[node] = tuple(behind)
        for after in chart.successors[node]:
            if not chart.on_host[chart.engine[after]]:
                self._unblock(after)
        return Issued(node, waits, mark)

    def _waits(self, node: int, engine: int) -> Sequence[int]:
        """The last enqueued first: it may have waited for the others."""
        chart, behind = self._chart, self._behind[engine]
        found: list[int] = []
        for dep in sorted(chart.deps[node], key=self._sequence.__getitem__, reverse=True):
            other, position = chart.engine[dep], self._position[dep]
            if position > behind[other] and position > self._finished[other]:
                found.append(dep)
                behind[:] = map(max, behind, self._before[dep])
        return found

    def _unblock(self, node: int) -> None:
        self._blocked[node] -= 1
        if not self._blocked[node] and self._waiting[node]:
            heappush(self._early[self._chart.engine[node]], self._rank[node])

    def complete(self, node: int) -> None:
        """The event of a marked node is done, hence all before it in its stream; or a task of the
        host is."""
        engine = self._chart.engine[node]
        if self._chart.on_host[engine]:
            self._end(node, engine)
            return
        queued = self._queued[engine]
        while queued and self._position[queued[0]] <= self._position[node]:
            self._end(queued.popleft(), engine)
        marks = self._marks[engine]
        while marks and self._position[marks[0]] <= self._position[node]:
            marks.popleft()
        self._finished[engine] = max(self._finished[engine], self._position[node])

    def _end(self, node: int, engine: int) -> None:
        chart = self._chart
        self._room[engine] += 1
        for after in chart.successors[node]:
            self._waiting[after] -= 1
            if chart.on_host[engine] or chart.on_host[chart.engine[after]]:
                self._blocked[after] -= 1
                if not self._blocked[after] and self._waiting[after]:
                    heappush(self._early[chart.engine[after]], self._rank[after])
            if not self._waiting[after] and not self._issued[after]:
                heappush(self._ready[chart.engine[after]], self._rank[after])
