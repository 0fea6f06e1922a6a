"""Proves that every order which keeps a MemGraph's edges gives the step's own bits. Pure.

This is an oracle: it does not know how a plan was made, and reads only the nodes (accesses, edges),
the graph, `arenas`, `starts`, `ends` and `scratch`. It checks four things, each relying on those
before:

    formed   edges lead forward, so there is no cycle; each task is there once, with the bytes
             that it touches; copies go from a device to the host or back; all lies in the arenas
    ordered  a path leads between any two nodes of which one writes bytes that the other touches
    after    a path leads to each task from those in its `after`
    valued   run in one legal order, every read finds the contents that the program's order gives

Why it asks only neighbours for a path: take one byte and the accesses to it in the order of the
nodes. A read is checked against the write before it. A write is checked against the reads since the
write before it or, if there are none, against that write. Two accesses further apart, one of them
writing, are joined by a chain of such neighbours, and paths add up. A missing path is itself a
conflict.

Why one order is enough for the values: any two conflicting nodes are ordered, so every legal order
does the same things to each byte in the same sequence.
"""

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from offload.graph.memgraph import (
    OFFLOAD,
    RELOAD,
    SEND,
    TASK,
    MemGraph,
    Node,
    Place,
    lane_name,
    lane_of_copy,
)
from offload.graph.taskgraph import HOST, Role
from offload.planning.byte_ranges import ByteRanges
from offload.planning.race_reports import (
    END,
    NOTHING,
    START,
    WORKSPACE,
    Conflict,
    Holding,
    Use,
    describe_arena,
    describe_use,
    fault,
    name_of,
    race,
    span,
    stale_bytes,
)

SOURCES = 4096
"""How many sources are followed at a time; each is a bit of an int at every node."""


def verify(memgraph: MemGraph) -> None:
    """Raise `RaceFound` if some legal order of the nodes would go wrong."""
    at = _check_numbers(memgraph)
    _check_edges(memgraph)
    _check_places(memgraph)
    for number in range(len(memgraph.nodes)):
        _check_node(memgraph, number)
    _check_paths(memgraph, at)
    _check_values(memgraph)


# ---- formed --------------------------------------------------------------------------------------


def _check_numbers(memgraph: MemGraph) -> list[int]:
    """The node of each task. Raises unless there is exactly one."""
    tasks, buffers = memgraph.graph.tasks, memgraph.graph.buffers
    at = [-1] * len(tasks)
    for number, node in enumerate(memgraph.nodes):
        known = len(tasks) if node.kind == TASK else len(buffers)
        which = node.task if node.kind == TASK else node.buffer
        if node.kind not in (TASK, OFFLOAD, RELOAD, SEND) or not 0 <= which < known:
            raise fault(f"node {number}", f"{node.kind} {which} is not one of {known}")
        if node.kind == TASK:
            if at[which] >= 0:
                raise fault(tasks[which].name, f"nodes {at[which]} and {number} both run it")
            at[which] = number
    if -1 in at:
        raise fault(tasks[at.index(-1)].name, "no node runs it")
    return at


def _check_edges(memgraph: MemGraph) -> None:
    for number, node in enumerate(memgraph.nodes):
        for dep in node.deps:
            if not 0 <= dep < number:
                other = memgraph.name(dep) if 0 <= dep < len(memgraph.nodes) else "no node"
                why = (
                    f"waits for {other}, node {dep}: edges lead from smaller to larger numbers, "
                    "or there may be a cycle"
                )
                raise fault(memgraph.name(number), why, after=other)


def _check_places(memgraph: MemGraph) -> None:
    """Check that everything lies within its arena, is aligned, and stays out of the scratch."""
    for arena, place in memgraph.scratch.items():
        if place.arena != arena:
            raise fault(
                "scratch",
                f"that of {describe_arena(arena)} is on {describe_arena(place.arena)}",
                place,
            )
        _check_inside(memgraph, place, "scratch")
    for places in (memgraph.starts, memgraph.ends):
        for b, place in places.items():
            buffer = memgraph.graph.buffers[b]
            if place.nbytes != buffer.nbytes:
                why = f"it has {buffer.nbytes} bytes"
                raise fault(buffer.name, why, place)
            _check_place(memgraph, place, buffer.name)
    for number, node in enumerate(memgraph.nodes):
        for access in node.accesses:
            _check_place(memgraph, access.place, number)


def _check_place(memgraph: MemGraph, place: Place, who: int | str) -> None:
    _check_inside(memgraph, place, who)
    if place.arena in memgraph.scratch:
        arena, begin, end = span(memgraph.scratch[place.arena])
        low, high = max(place.offset, begin), min(place.offset + place.nbytes, end)
        if low < high:
            shared = Place(arena, low, high - low)
            raise fault(name_of(memgraph, who), "it overlaps the scratch", shared, "scratch")


def _check_inside(memgraph: MemGraph, place: Place, who: int | str) -> None:
    size = memgraph.arenas.get(place.arena, 0)
    if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > size:
        raise fault(name_of(memgraph, who), f"the arena has {size} bytes", place)
    alignment = memgraph.graph.alignment
    if place.offset % alignment:
        why = f"offset {place.offset} is not a multiple of {alignment}"
        raise fault(name_of(memgraph, who), why, place)


def _check_node(memgraph: MemGraph, number: int) -> None:
    """Check that a node does what its task, or the copied buffer, says."""
    node = memgraph.nodes[number]
    lanes, uses = (_uses_of_task if node.kind == TASK else _uses_of_copy)(memgraph, node)
    actual: list[Use] = [
        (a.place.arena, a.place.nbytes, a.buffer, a.reads, a.writes) for a in node.accesses
    ]
    if node.lane not in lanes:
        why = f"it runs on lane {node.lane}, but belongs on {' or '.join(sorted(lanes))}"
        raise fault(memgraph.name(number), why)
    if node.kind != TASK and node.nbytes != uses[0][1]:
        why = f"it says that it moves {node.nbytes} bytes, but expected are {uses[0][1]}"
        raise fault(memgraph.name(number), why)
    if actual != uses:
        for access, use, wanted in zip_longest(node.accesses, actual, uses):
            if use != wanted:
                does, expected = describe_use(memgraph, use), describe_use(memgraph, wanted)
                why = f"it {does}: expected that it {expected}"
                raise fault(memgraph.name(number), why, access and access.place)


def _uses_of_task(memgraph: MemGraph, node: Node) -> tuple[set[str], list[Use]]:
    task, buffers = memgraph.graph.tasks[node.task], memgraph.graph.buffers
    arena = HOST if task.lane == "host" else task.device
    uses: list[Use] = []
    for b in task.touches:
        uses.append((arena, buffers[b].nbytes, b, b in task.reads, b in task.writes))
    # Tasks that share the scratch must run one at a time, as a device's compute lane does.
    scratch = memgraph.scratch.get(task.device) if task.lane == "compute" else None
    if len(node.accesses) > len(uses) or task.workspace > (scratch.nbytes if scratch else 0):
        uses.append((arena, task.workspace, None, False, True))
    return {lane_name(task.lane, task.device)}, uses


def _uses_of_copy(memgraph: MemGraph, node: Node) -> tuple[set[str], list[Use]]:
    b, buffer = node.buffer, memgraph.graph.buffers[node.buffer]
    devices = [access.place.arena for access in node.accesses if access.place.arena != HOST] or [0]
    source = HOST if node.kind == RELOAD else devices[0]
    target = HOST if node.kind == OFFLOAD else devices[-1]
    return {lane_of_copy(source, target)}, [
        (source, buffer.nbytes, b, True, False),
        (target, buffer.nbytes, b, False, True),
    ]


# ---- ordered -------------------------------------------------------------------------------------


Readers = tuple[int, "Readers"] | None
"""A linked list: the last reader and those before it. Ranges that are cut share its tail."""
Users = tuple[int, Readers]
"""The last writer, and the readers since then."""


Conflicts = dict[tuple[int, int], Conflict]


def _check_paths(memgraph: MemGraph, at: list[int]) -> None:
    nodes, asked = memgraph.nodes, _find_conflicts(memgraph)
    graph = memgraph.graph
    for number, task in enumerate(graph.tasks):
        for before in task.after:
            a, b = at[before], at[number]
            conflict = asked.setdefault((a, b), Conflict())
            if a >= b:
                raise race(memgraph, a, b, conflict)
    # Most pairs are edges themselves.
    for a, b in _find_unordered(nodes, [(a, b) for a, b in asked if a not in nodes[b].deps]):
        raise race(memgraph, a, b, asked[a, b])


def _find_conflicts(memgraph: MemGraph) -> Conflicts:
    """The neighbours at every byte (see above), with the first bytes that they share."""
    touched = {
        arena: ByteRanges[Users](size, (-1, None)) for arena, size in memgraph.arenas.items()
    }
    asked: Conflicts = {}

    def ask(a: int, b: int, arena: int, low: int, high: int, verbs: tuple[str, str]) -> None:
        if a < 0:
            return
        known = asked.setdefault((a, b), Conflict(arena, low, low, verbs))
        if (known.arena, known.end, known.verbs) == (arena, low, verbs):
            known.end = high
        if a == b:
            raise race(memgraph, a, b, known)

    for number, node in enumerate(memgraph.nodes):
        for access in node.accesses:
            arena, begin, end = span(access.place)
            if begin == end:
                continue
            ranges = touched[arena]
            for low, high, (writer, readers) in ranges.items(begin, end):
                if not access.writes:
                    ask(writer, number, arena, low, high, ("writes", "reads"))
                elif readers is None:
                    ask(writer, number, arena, low, high, ("writes", "writes"))
                else:
                    for reader in _readers_in(readers):
                        ask(reader, number, arena, low, high, ("reads", "writes"))
            if access.writes:
                ranges.put(begin, end, (number, None))
            else:
                for part in ranges.cut(begin, end):
                    writer, readers = ranges.known[part]
                    ranges.known[part] = (writer, (number, readers))
    return asked


def _readers_in(readers: Readers) -> Iterator[int]:
    while readers is not None:
        reader, readers = readers
        yield reader


def _find_unordered(
    nodes: tuple[Node, ...], pairs: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The pairs that no path joins; the smaller node is the source. Many pairs are checked at once:
    each node learns from its dependencies which of the sources reach it."""
    targets: dict[int, list[int]] = {}
    for a, b in pairs:
        targets.setdefault(a, []).append(b)
    sources = sorted(targets)
    for at in range(0, len(sources), SOURCES):
        chunk = sources[at : at + SOURCES]
        first = chunk[0]
        bits = {a: 1 << bit for bit, a in enumerate(chunk)}
        asked: dict[int, list[int]] = {}
        for a in chunk:
            for b in targets[a]:
                asked.setdefault(b, []).append(a)
        reached: list[int] = []
        for number in range(first, max(asked) + 1):
            mask = bits.get(number, 0)
            for dep in nodes[number].deps:
                if dep >= first and reached[dep - first]:
                    mask = mask | reached[dep - first] if mask else reached[dep - first]
            reached.append(mask)
            for a in asked.get(number, ()):
                if not mask & bits[a]:
                    yield a, number


# ---- valued --------------------------------------------------------------------------------------


class _BytesHeld:
    """What every byte holds at a moment of a run."""

    def __init__(self, memgraph: MemGraph) -> None:
        arenas = memgraph.arenas.items()
        self._memgraph = memgraph
        self._held = {a: ByteRanges[Holding](size, (NOTHING, 0, 0, -1)) for a, size in arenas}

    def put(self, b: int, version: int, place: Place, by: int) -> None:
        arena, begin, end = span(place)
        if begin < end:
            self._held[arena].put(begin, end, (b, version, begin, by))

    def expect(self, b: int, version: int | None, place: Place, who: int | str) -> int:
        """Check that the place holds the whole buffer in this version. Any version if None, and the
        version found is returned."""
        arena, begin, end = span(place)
        for low, high, holding in self._held[arena].items(begin, end) if begin < end else ():
            if version is None and holding[0] == b:
                version = holding[1]
            if holding[:3] != (b, version, begin):
                raise stale_bytes(self._memgraph, b, version, holding, (arena, low, high), who)
        return version or 0


def _check_values(memgraph: MemGraph) -> None:
    graph, contents = memgraph.graph, _BytesHeld(memgraph)
    versions, last = _count_versions(memgraph)
    for b, place in memgraph.starts.items():
        if graph.buffers[b].persistent or graph.buffers[b].role is Role.INPUT:
            contents.put(b, 0, place, -1)
    for b, place in memgraph.starts.items():
        contents.expect(b, 0, place, START)
    for number, node in enumerate(memgraph.nodes):
        if node.kind == TASK:
            _replay(contents, node, number, versions[node.task])
        else:
            [source, target] = node.accesses
            version = contents.expect(node.buffer, None, source.place, number)
            contents.put(node.buffer, version, target.place, number)
    for b, buffer in enumerate(graph.buffers):
        if buffer.persistent and b in memgraph.starts:
            contents.expect(b, last[b], memgraph.starts[b], END)
        elif buffer.persistent and last[b]:
            raise fault(buffer.name, "the step changes it, but it has no place in `starts`")
    for b in graph.outputs:
        if b not in memgraph.ends:
            raise fault(graph.buffers[b].name, "an output has no place in `ends`")
        contents.expect(b, last[b], memgraph.ends[b], END)


def _replay(contents: _BytesHeld, node: Node, number: int, versions: tuple[int, ...]) -> None:
    """Run one node: a task reads everything before it writes anything."""
    for access, version in zip(node.accesses, versions, strict=False):
        if access.reads and access.buffer is not None:
            contents.expect(access.buffer, version, access.place, number)
    for access, version in zip(node.accesses, (*versions, 0), strict=False):
        if access.writes:
            b = WORKSPACE if access.buffer is None else access.buffer
            contents.put(b, version + 1, access.place, number)


def _count_versions(memgraph: MemGraph) -> tuple[list[tuple[int, ...]], list[int]]:
    """How often each buffer that a task touches was written before it, and how often in the end."""
    count = [0] * len(memgraph.graph.buffers)
    before: list[tuple[int, ...]] = []
    for task in memgraph.graph.tasks:
        before.append(tuple(count[b] for b in task.touches))
        for b in set(task.writes):
            count[b] += 1
    return before, count
