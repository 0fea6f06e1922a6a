"""Where every byte lies and what waits for what (the MEMGRAPH of the DISCO paper, section 3). Pure.

    nodes   R w2 ......... F2 ....... O a1      R reload: to the device    O offload: to the host
    edges   F1 -> R w2 (memory: w2 lies where F1's reads lay)   R w2 -> F2 (data)

A node is a task of the graph, or a copy that the planner added. It names the bytes that it touches.
All orders that keep the edges give the same bits, as `verify.py` proves.

The nodes are listed in an order that keeps the edges: `deps` are smaller numbers. Among ready nodes
the one with the smallest number comes first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import GraphError
from offload.graph.taskgraph import ALIGNMENT as ALIGNMENT
from offload.graph.taskgraph import HOST, TaskGraph

TASK, OFFLOAD, RELOAD, SEND = "task", "offload", "reload", "send"
SMALL_WORKSPACE = 1 << 16


def lane_name(kind: str, device: int = 0, to: int | None = None) -> str:
    """`compute`, `h2d`, `d2h` on device 0; `compute1` on device 1; `host`; `d2d0-1` between two."""
    if kind == "host":
        return kind
    if to is not None:
        return f"{kind}{device}-{to}"
    return f"{kind}{device}" if device else kind


def lane_of_copy(source: int, target: int) -> str:
    """The lane that copies from one arena to another."""
    if HOST in (source, target):
        return lane_name("d2h", source) if target == HOST else lane_name("h2d", target)
    return lane_name("d2d", source, target)


def ends_of_lane(lane: str) -> tuple[int, int]:
    """The arenas from which and to which a lane copies."""
    way, devices = lane[:3], lane[3:]
    if way == "d2d":
        source, target = devices.split("-")
        return int(source), int(target)
    device = int(devices or 0)
    return (device, HOST) if way == "d2h" else (HOST, device)


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [offset, offset + nbytes) of an arena: a device's, or HOST."""

    arena: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Access:
    """What a node does to the bytes at a place. `buffer` is None for a task's workspace."""

    place: Place
    buffer: int | None
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class Node:
    """One task or copy that a lane runs."""

    kind: str
    lane: str
    accesses: tuple[Access, ...]
    """Of a task: one for each buffer in `touches`, in that order, then one for its workspace, if
    any. Of a copy: the place that it reads, then the one that it writes."""
    deps: tuple[int, ...]
    task: int = -1
    """The number of its task in the graph; for a copy, of the task at which it was planned."""
    buffer: int = -1
    """The buffer that a copy moves."""
    nbytes: int = 0
    """The bytes that a copy moves."""


@dataclass(frozen=True, slots=True)
class Block:
    """One stay of a buffer at one place, and the nodes that touch it there."""

    place: Place
    buffer: int | None
    nodes: tuple[int, ...]
    from_start: bool = False
    """Whether it lies there when the step begins."""
    to_end: bool = False
    """Whether it lies there when the step ends."""


@dataclass(frozen=True, slots=True, eq=False)
class MemGraph:
    """A TaskGraph with an address for everything."""

    graph: TaskGraph
    nodes: tuple[Node, ...]
    arenas: Mapping[int, int]
    """The bytes that are used of each device's arena and of the host's."""
    starts: Mapping[int, Place]
    """Where persistent buffers and inputs lie when the step begins: on their device (resident) or
    in the host arena (streamed). Persistent buffers lie there again when the step ends."""
    ends: Mapping[int, Place]
    """Where the outputs lie when the step ends."""
    blocks: tuple[Block, ...]
    scratch: Mapping[int, Place]
    """For each device, memory for workspaces of up to `SMALL_WORKSPACE` bytes. Its compute lane
    runs one task at a time, so all tasks share it, and no node names it."""

    def __repr__(self) -> str:
        return f"<MemGraph: {len(self.nodes)} nodes, arenas of {dict(self.arenas)} bytes>"

    def describe(self, number: int) -> str:
        """Describe the node, with its task and the user's line, for error messages."""
        node = self.nodes[number]
        task = self.graph.tasks[node.task]
        what = f"task {task.name}"
        if node.kind != TASK:
            what = f"{self.name(number)} for {what}"
        return f"{what} ({task.where})" if task.where else what

    def name(self, number: int) -> str:
        """A readable name: that of the task, or `reload conv1.weight`."""
        node = self.nodes[number]
        if node.kind == TASK:
            return self.graph.tasks[node.task].name
        return f"{node.kind} {self.graph.buffers[node.buffer].name}"


def places_of(memgraph: MemGraph) -> dict[str, Place]:
    """The home of every persistent tensor. Its pieces lie side by side."""
    pieces: dict[str, list[tuple[int, Place]]] = {}
    for number, buffer in enumerate(memgraph.graph.buffers):
        if buffer.persistent and number in memgraph.starts:
            pieces.setdefault(buffer.tensor, []).append((buffer.start, memgraph.starts[number]))
    return {key: _join_pieces(key, sorted(parts, key=_start)) for key, parts in pieces.items()}


def _start(piece: tuple[int, Any]) -> int:
    return piece[0]


def _join_pieces(key: str, pieces: list[tuple[int, Place]]) -> Place:
    first, home = pieces[0]
    end = first
    for start, place in pieces:
        apart = place.offset - start != home.offset - first or place.arena != home.arena
        if first or start != end or apart:
            raise GraphError(f"the pieces of tensor {key} do not lie side by side: {pieces}")
        end = start + place.nbytes
    return Place(home.arena, home.offset, end)
