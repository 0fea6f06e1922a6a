"""What a step does, as tasks over buffers (the TASKGRAPH of the DISCO paper, section 3). Pure.

    buffers  x(input) w(parameter) y z        tasks  f: x w -> y      g: y -> z      u: z w -> w

The tasks are listed in an order in which they may run one after the other. That run defines the
meaning of the graph. Another order gives the same bits if every two tasks that touch the same
buffer, one of them writing, keep their order. A view is no buffer: a buffer is a whole storage.

A task that lists a buffer in `writes` but not in `reads` overwrites its contents completely. A task
that changes a part of it, or adds to it, lists it in both.

Passes turn a graph into another. They never renumber buffers, because kernels name them by number.
They add buffers at the end and leave some without a user.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from offload.errors import GraphError

ALIGNMENT = 64
"""Every offset in an arena is a multiple of it, unless the program needs more."""
HOST = -1
"""The arena number of the host."""
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
"""Phases of a step."""


class Role(StrEnum):
    """What a buffer is for."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    """A module's own buffers: statistics, counters."""
    STATE = "state"
    """The optimizer's state."""
    CONSTANT = "constant"
    ACTIVATION = "activation"
    """Made in the forward pass and read in the backward pass."""
    GRADIENT = "gradient"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"
    """Memory that a kernel allocates and frees within itself."""


PERSISTENT = frozenset({Role.PARAMETER, Role.BUFFER, Role.STATE, Role.CONSTANT})


@dataclass(frozen=True, slots=True)
class Buffer:
    """One storage. A persistent one lives from step to step."""

    name: str
    nbytes: int
    role: Role = Role.TEMPORARY
    tensor: str = ""
    """The user's tensor whose bytes these are, from `start` on. At home its pieces lie side by
    side, so that it stays one tensor."""
    start: int = 0

    @property
    def persistent(self) -> bool:
        return self.role in PERSISTENT


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel call, or several that always run together."""

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    lane: str = "compute"
    """compute; host: works on the buffers' host copies."""
    device: int = 0
    """Where it runs, so where its operands are needed. The plan copies them there."""
    after: tuple[int, ...] = ()
    """Tasks that must run before it although no buffer says so: random draws, for example."""
    workspace: int = 0
    """Bytes that it allocates and frees within itself if its outputs are placed."""
    unplaced: int = 0
    """Bytes that it allocates outside of the arena if its outputs are not placed."""
    stray: int = 0
    """Bytes that threads of its own allocate; they cannot be placed."""
    flops: float = 0.0
    traffic: int = 0
    """Bytes that it reads and writes."""
    seconds: float | None = None
    """Measured seconds."""
    phase: str = FORWARD
    """forward, backward or update."""
    repeatable: bool = False
    """Whether running it again on the same reads gives the same bits and changes nothing else."""
    random: bool = False
    """Whether it draws random numbers. `after` chains such tasks."""
    turn: int = 0
    """The number of its micro-batch among several (lowering/micro_batches.py)."""
    lap: int = 0
    """How often its micro-batch has gone round all devices before (lowering/device_placing.py)."""
    pointwise: bool = False
    recomputes: str = ""
    """The task that this one runs once more."""
    kernel: Any = None
    """A kernel to bind to addresses (kernels.py), or `fn(reads, writes)` over views of bytes."""
    where: str = ""
    """The user's line: `model.py:31 in forward`."""

    @property
    def touches(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.reads, *self.writes)))

    def rename(self, names: Mapping[int, int]) -> "Task":
        """The same task over renamed buffers."""
        kernel = self.kernel.rename(names) if hasattr(self.kernel, "rename") else self.kernel
        return replace(
            self,
            reads=tuple(names.get(b, b) for b in self.reads),
            writes=tuple(names.get(b, b) for b in self.writes),
            kernel=kernel,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TaskGraph:
    """A step. `GraphBuilder` makes one by hand; a pass makes a new one."""

    buffers: tuple[Buffer, ...] = ()
    tasks: tuple[Task, ...] = ()
    outputs: tuple[int, ...] = ()
    """Buffers that the caller reads after the step."""
    program: Any = None
    """How it is bound to the user's program (`kernels.Program`); None for a handmade graph."""
    notes: tuple[str, ...] = ()
    """What passes did that a person should know. `explain()` shows it."""
    kept: tuple[int, ...] = ()
    """Persistent buffers that no task touches and that have a place all the same, because other
    steps of the same runner use them."""
    device_count: int = 1
    """How many devices the step was placed on. Some may have no task of it."""
    homes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By tensor: the device where other steps of the same runner have left it."""

    def __repr__(self) -> str:
        return f"<TaskGraph: {len(self.tasks)} tasks over {len(self.buffers)} buffers>"

    @property
    def devices(self) -> list[int]:
        """The devices that need an arena."""
        return sorted({*range(self.device_count), *(task.device for task in self.tasks)})

    @property
    def alignment(self) -> int:
        """Every offset in an arena is a multiple of it."""
        return ALIGNMENT if self.program is None else self.program.alignment

    def align(self, nbytes: int) -> int:
        """Round `nbytes` up to what such a buffer takes in an arena."""
        alignment = self.alignment
        return max(1, -(-nbytes // alignment)) * alignment

    def with_tasks(
        self, tasks: Sequence[Task], buffers: Sequence[Buffer] | None = None, *notes: str
    ) -> "TaskGraph":
        """The same step with other tasks, whose `after` has the numbers of these tasks. `notes`:
        what to add to the graph's; an empty text is left out."""
        return replace(
            self,
            buffers=tuple(self.buffers if buffers is None else buffers),
            tasks=tuple(tasks),
            notes=(*self.notes, *filter(None, notes)),
        )

    def on_one_device(self) -> "TaskGraph":
        """The same step, which is placed on no devices yet."""
        tasks = [replace(task, device=0) for task in self.tasks]
        return replace(self.with_tasks(tasks), device_count=1, homes={})

    def reorder(self, order: Sequence[int], *notes: str) -> "TaskGraph":
        """Put the tasks in another order, which must keep `dependencies`."""
        if len({*order}) < len(self.tasks):
            raise GraphError(f"an order of {len({*order})} of the {len(self.tasks)} tasks")
        place = {old: new for new, old in enumerate(order)}
        tasks = [self.tasks[old] for old in order]
        tasks = [
            replace(task, after=tuple(place[a] for a in task.after)) if task.after else task
            for task in tasks
        ]
        return self.with_tasks(tasks, None, *notes)

    def dependencies(self) -> list[list[int]]:
        """For every task, the tasks that must run before it: reads after writes, writes after
        reads, writes after writes, and `after`. Ascending, without repeats."""
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        needed: list[list[int]] = []
        for number, task in enumerate(self.tasks):
            before = set(task.after)
            for b in task.reads:
                if b in writer:
                    before.add(writer[b])
            for b in task.writes:
                if b in writer:
                    before.add(writer[b])
                before.update(readers.get(b, ()))
            before.discard(number)
            needed.append(sorted(before))
            for b in task.reads:
                readers.setdefault(b, []).append(number)
            for b in task.writes:
                writer[b] = number
                readers[b] = []
        return needed

    def check(self) -> None:
        """Raise `GraphError` if the graph is not valid."""
        known = len(self.buffers)
        written = {n for n, b in enumerate(self.buffers) if b.persistent or b.role is Role.INPUT}
        changers: dict[int, Task] = {}
        for buffer in self.buffers:
            if buffer.nbytes < 0:
                raise GraphError(f"buffer {buffer.name} has {buffer.nbytes} bytes")
        for number, task in enumerate(self.tasks):
            if task.device < 0:
                raise GraphError(f"task {task.name} runs on device {task.device}: count from 0")
            for b in task.touches:
                if not 0 <= b < known:
                    raise GraphError(
                        f"task {task.name} touches buffer {b}; the last buffer is {known - 1}"
                    )
            for b in task.reads:
                if b not in written:
                    raise GraphError(
                        f"task {task.name} reads {self.buffers[b].name}, but no task has written it"
                    )
            written.update(task.writes)
            for b in task.writes if task.lane == "compute" else ():
                other = changers.setdefault(b, task)
                if self.buffers[b].persistent and other.device != task.device:
                    raise GraphError(
                        f"{task.name} on device {task.device} changes {self.buffers[b].name}, which"
                        f" {other.name} changes on device {other.device}; let one device do both"
                    )
            if any(not 0 <= a < number for a in task.after):
                raise GraphError(
                    f"task {number} ({task.name}) has after={task.after}; give smaller numbers"
                )
            if len(set(task.writes)) < len(task.writes):
                raise GraphError(f"task {task.name} lists a buffer twice in its writes")
        for b in self.outputs:
            if not (0 <= b < known and b in written):
                raise GraphError(f"no task writes output {b}")
        for b in self.kept:
            if not (0 <= b < known and self.buffers[b].persistent):
                raise GraphError(f"buffer {b} is kept for other steps, but it is not persistent")

    def home_devices(self) -> list[int]:
        """By buffer: the device that changes it, or where other steps have left it, or the first
        one that reads it, or else any."""
        changed: dict[int, int] = {}
        first_read: dict[int, int] = {}
        for task in self.tasks:
            if task.lane == "compute":
                for b in task.writes:
                    changed.setdefault(b, task.device)
                for b in task.reads:
                    first_read.setdefault(b, task.device)
        first = self.devices[0]
        tensors = enumerate(buffer.tensor for buffer in self.buffers)
        left = {b: self.homes[tensor] for b, tensor in tensors if tensor in self.homes}
        where = first_read | left | changed
        return [where.get(b, first) for b in range(len(self.buffers))]

    def live_bytes(self) -> list[int]:
        """For every task, the bytes on the devices while it runs if nothing is ever offloaded.
        Persistent buffers and inputs lie there from the start."""
        first, last = self.spans()
        change = [0] * (len(self.tasks) + 1)
        for b, buffer in enumerate(self.buffers):
            if b in first:
                change[first[b]] += buffer.nbytes
                change[last[b] + 1] -= buffer.nbytes
        live, now = [], 0
        for number, task in enumerate(self.tasks):
            now += change[number]
            live.append(now + task.workspace)
        return live

    def spans(self, device: int | None = None) -> tuple[dict[int, int], dict[int, int]]:
        """The first and the last task at which each used buffer must exist; on a device: as if what
        it uses stayed there, which for the step's whole time is what has its home there."""
        end = len(self.tasks) - 1
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        homes = self.home_devices()
        for number, task in enumerate(self.tasks):
            for b in task.touches if device in (None, task.device) else ():
                first.setdefault(b, number)
                last[b] = number
        at_home = [device in (None, home) for home in homes]
        for b in self.kept:
            if at_home[b]:
                first[b] = 0
        for b, buffer in enumerate(self.buffers):
            if b in first and at_home[b] and (buffer.persistent or buffer.role is Role.INPUT):
                first[b] = 0
            if b in first and (b in self.outputs or (at_home[b] and buffer.persistent)):
                last[b] = end
        return first, last
