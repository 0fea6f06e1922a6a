"""The numbers of a plan for its table and its picture. Pure.

    block   |-- its first node starts ....... its last node ends --|
            0 if it is there from the start     the step's end if it stays
    usage   bytes of an arena that hold something, by role, from moment to moment

Everything is read off the MemGraph and its simulated run; nothing is decided here.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from offload.graph.memgraph import OFFLOAD, RELOAD, SMALL_WORKSPACE, TASK, Block, MemGraph
from offload.graph.taskgraph import HOST, Buffer, Role, TaskGraph
from offload.planning.refusal import scratch_bytes
from offload.planning.simulator import Timeline

NAMES = MappingProxyType(
    {
        Role.PARAMETER: "parameters",
        Role.STATE: "optimizer state",
        Role.BUFFER: "buffers",
        Role.CONSTANT: "constants",
        Role.INPUT: "inputs",
        Role.ACTIVATION: "activations",
        Role.GRADIENT: "gradients",
        Role.TEMPORARY: "temporaries",
        Role.WORKSPACE: "workspace",
    }
)
ROLES = tuple(NAMES)
"""The roles in the order in which people see them."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of things and their bytes together."""

    count: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Life:
    """How long a block holds something."""

    block: Block
    role: Role
    start: float
    end: float


@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """The bytes of an arena that hold something, over time."""

    times: NDArray[np.float64]
    by_role: Mapping[Role, NDArray[np.int64]]
    """The bytes of each role, from each of `times` to the next."""

    @property
    def total(self) -> NDArray[np.int64]:
        return np.stack(list(self.by_role.values())).sum(axis=0)

    @property
    def fullest(self) -> int:
        """The number of the moment of `times` at which most bytes are held."""
        return int(np.argmax(self.total))


def count_used(graph: TaskGraph) -> dict[Role, Amount]:
    """Every buffer that a task touches, counted once."""
    return _amounts(graph.buffers[b] for b in {b for task in graph.tasks for b in task.touches})


def count_at_home(memgraph: MemGraph, arenas: Collection[int]) -> dict[Role, Amount]:
    """What lives in these arenas from step to step: resident on a device, streamed in HOST."""
    return _amounts(
        memgraph.graph.buffers[b]
        for b, place in memgraph.starts.items()
        if memgraph.graph.buffers[b].persistent and place.arena in arenas
    )


def count_moved(memgraph: MemGraph, kind: str) -> dict[Role, Amount]:
    """The copies of one step. `kind`: offload, reload or send."""
    return _amounts(memgraph.graph.buffers[n.buffer] for n in memgraph.nodes if n.kind == kind)


def count_dropped(memgraph: MemGraph) -> Amount:
    """Device copies that give up their place without a copy, because the host has the same
    bytes."""
    nodes = memgraph.nodes
    last_reload = {node.buffer: n for n, node in enumerate(nodes) if node.kind == RELOAD}
    buffers: list[Buffer] = []
    for block in memgraph.blocks:
        b = block.buffer
        if b is None or block.to_end or block.place.arena == HOST or not block.nodes:
            continue
        offloaded = any(nodes[n].kind == OFFLOAD for n in block.nodes)
        wanted = memgraph.graph.buffers[b].persistent or last_reload.get(b, -1) > max(block.nodes)
        if wanted and not offloaded:
            buffers.append(memgraph.graph.buffers[b])
    return add_up(_amounts(buffers))


def add_up(amounts: Mapping[Role, Amount]) -> Amount:
    return Amount(
        sum(amount.count for amount in amounts.values()),
        sum(amount.nbytes for amount in amounts.values()),
    )


def find_lives(memgraph: MemGraph, timeline: Timeline) -> list[Life]:
    """How long each block holds something in the run of `timeline`."""
    starts, ends = [0.0] * len(memgraph.nodes), [0.0] * len(memgraph.nodes)
    for node, _, start, end in timeline:
        starts[node], ends[node] = start, end
    whole = max(ends, default=0.0)
    lifetimes: list[Life] = []
    for block in memgraph.blocks:
        begin = 0.0 if block.from_start else min((starts[n] for n in block.nodes), default=0.0)
        end = whole if block.to_end else max((ends[n] for n in block.nodes), default=0.0)
        role = Role.WORKSPACE
        if block.buffer is not None:
            role = memgraph.graph.buffers[block.buffer].role
        lifetimes.append(Life(block, role, begin, end))
    return lifetimes


def measure_usage(memgraph: MemGraph, lived: Iterable[Life], arena: int, beside: int = 0) -> Usage:
    """The use of an arena over time. `beside`: bytes that kernels allocate outside of it."""
    here = [life for life in lived if life.block.place.arena == arena and life.start < life.end]
    moments = [0.0, *(life.start for life in here), *(life.end for life in here)]
    times = np.unique(np.asarray(moments, dtype=np.float64))
    changes = {role: np.zeros(len(times), dtype=np.int64) for role in ROLES}
    starts = np.searchsorted(times, [life.start for life in here])
    ends = np.searchsorted(times, [life.end for life in here])
    for life, start, end in zip(here, starts, ends, strict=True):
        changes[life.role][start] += life.block.place.nbytes
        changes[life.role][end] -= life.block.place.nbytes
    scratch = memgraph.scratch.get(arena)
    changes[Role.WORKSPACE][0] += beside + (scratch.nbytes if scratch else 0)
    return Usage(times, {role: np.cumsum(change) for role, change in changes.items()})


def trace_unmoved(
    source: TaskGraph, memgraph: MemGraph, timeline: Timeline, device: int
) -> tuple[list[float], list[int]]:
    """When the tasks of `source` start in this run, and the bytes of a device that would be live
    then if nothing ever left it and nothing were computed twice."""
    started = {node: start for node, _, start, _ in timeline}
    tasks = memgraph.graph.tasks
    times = [
        started[n]
        for n, node in enumerate(memgraph.nodes)
        if node.kind == TASK and not tasks[node.task].recomputes
    ]
    change = [scratch_bytes(source, device)] + [0] * len(source.tasks)
    first, last = source.spans(device)
    for b, begin in first.items():
        change[begin] += source.align(source.buffers[b].nbytes)
        change[last[b] + 1] -= source.align(source.buffers[b].nbytes)
    levels: list[int] = []
    live = 0
    for task, more in zip(source.tasks, change, strict=False):
        live += more
        # Smaller workspaces share the scratch memory.
        has_workspace = task.device == device and task.workspace > SMALL_WORKSPACE
        levels.append(live + (source.align(task.workspace) if has_workspace else 0))
    # Keep the program's order: a task that starts before its turn must not turn the curve back.
    return np.maximum.accumulate(times).tolist() if times else [], levels


def pick_highest(
    times: NDArray[np.float64], sizes: NDArray[np.int64], columns: int
) -> NDArray[np.int64]:
    """The moments to draw in a picture with so many columns: the highest of each column."""
    if len(times) <= columns:
        return np.arange(len(times))
    column = np.floor(times / times[-1] * (columns - 1)).astype(np.int64)
    by_size = np.lexsort((sizes, column))
    ends = np.append(np.flatnonzero(np.diff(column[by_size])), len(by_size) - 1)
    return by_size[ends]


def _amounts(buffers: Iterable[Buffer]) -> dict[Role, Amount]:
    by_role: dict[Role, list[int]] = {}
    for buffer in buffers:
        by_role.setdefault(buffer.role, []).append(buffer.nbytes)
    return {role: Amount(len(sizes), sum(sizes)) for role, sizes in by_role.items()}


def format_seconds(seconds: float) -> str:
    """A readable time: `12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.{3 if seconds < 999 * size else 5}g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_share(part: float, whole: float) -> str:
    """A readable share: `60 %`."""
    percent = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < percent < 0.5 else f"{percent:.0f} %"
