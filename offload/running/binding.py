"""A plan bound to arenas: every node is a call without arguments, and so is what is around them.

begin(batch)   inputs -> their places            work    what an engine runs
outputs()      places -> new tensors             tailed  the same in two parts: body and tail
                                                 notes   what to say when it fails
"""

import warnings
from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import partial
from typing import Any

import torch

from offload.gate import stand_aside
from offload.graph.memgraph import TASK, MemGraph, Node
from offload.graph.remarks import Remarks
from offload.graph.taskgraph import Role, TaskGraph
from offload.memory.arenas import Arenas
from offload.memory.homes import Homes
from offload.memory.placement import PlacementCounts, bind_task
from offload.memory.runnable import RunnablePlan
from offload.planning.host_tails import host_tail
from offload.planning.simulator import node_seconds
from offload.program.generators import generators_of
from offload.program.kernels import Program, Value
from offload.running.captured_poison import CapturedPoison
from offload.running.drivers.cuda import Cuda
from offload.running.engines.tail_crew import SplitWork, TailCrew
from offload.running.engines.work import Record, Run, StepWork
from offload.running.poison import Poison
from offload.torch_seams import pytree

Watch = Callable[[MemGraph, Arenas, int, Run], Run]
"""Returns the run of a node with something around it."""


class Binding:
    """One plan, bound. The user's tensors are not at home before `homes.settle()`."""

    def __init__(
        self,
        plan: RunnablePlan,
        arenas: Arenas,
        placed: PlacementCounts,
        *,
        poison: bool = False,
        watch: Watch | None = None,
        driver: Cuda | None = None,
        captured: bool = False,
    ) -> None:
        """`placed` counts what became of the kernels' outputs. `driver` has the streams that nodes
        are enqueued on; without one, a node is done when its call returns. `captured`: a graph of
        the nodes is replayed."""
        self.memgraph = plan.memgraph
        self.program = program_of(plan.graph)
        self.homes = Homes(self.memgraph, arenas, self.program.tensors)
        kind = CapturedPoison if captured else Poison
        self._poison = kind(self.memgraph, arenas) if poison else None
        self._inputs = [self._bind_input(value, arenas) for value in self.program.inputs]
        outputs = pytree.tree_leaves(self.program.outputs)
        self._outputs = [self._bind_output(value, arenas) for value in outputs]
        runs = [
            _bind(self.memgraph, node, arenas, plan.placement, placed, driver)
            for node in self.memgraph.nodes
        ]
        if self._poison:
            runs = [self._poison.wrap(node, run) for node, run in enumerate(runs)]
        if watch is not None:
            runs = [watch(self.memgraph, arenas, node, run) for node, run in enumerate(runs)]
        report = partial(_add_remark, plan.remarks)
        self.work = StepWork.from_memgraph(
            self.memgraph,
            runs,
            report,
            _why_uncaptured(self.memgraph, arenas),
            node_seconds(self.memgraph, plan.costs) if driver is not None else (),
        )
        self._tail: Sequence[int] | None = None
        self._split: SplitWork | None = None

    def _bind_input(self, value: Value, arenas: Arenas) -> torch.Tensor | None:
        """The memory that an input is copied to; None if no task reads it."""
        place = self.memgraph.starts.get(value.buffer)
        return None if place is None else arenas.view(place, value)

    def _bind_output(self, value: Any, arenas: Arenas) -> Any:
        if not isinstance(value, Value):
            return value
        place = self.memgraph.ends.get(value.buffer) or self.memgraph.starts[value.buffer]
        return arenas.view(place, value)

    def split_tail(self, crew: TailCrew) -> SplitWork | None:
        """The work with its tail for this crew; None if it has none. It is cut once."""
        if self._tail is None:
            self._tail = host_tail(self.memgraph)
            self._split = crew.split(self.work, self._tail) if self._tail else None
        return self._split

    def begin(self, batch: Sequence[torch.Tensor]) -> None:
        if self._poison:
            self._poison.begin()
        # No copy of the step before reads the host's arena any more: engines see to that. A batch
        # that lies on the device is copied to the host, and that copy waits for the step before.
        # If it did not, a task of the host could read it too early, and little time were saved.
        for target, given in zip(self._inputs, batch, strict=True):
            if target is not None:
                stand_aside()
                target.copy_(given)

    def outputs(self) -> tuple[Any, ...]:
        """New tensors on the device where kernels run, wherever the outputs lie."""
        device, made = self.program.device, []
        for value in self._outputs:
            stand_aside()
            made.append(value.to(device, copy=True) if isinstance(value, torch.Tensor) else value)
        return tuple(made)


def _why_uncaptured(memgraph: MemGraph, arenas: Arenas) -> str:
    """Why no graph can be captured; empty where one can. CUDA copies memory that is not page-locked
    by way of a buffer of its own, which the host fills. Only the first device's default generator
    takes part in a replay."""
    graph = memgraph.graph
    if generators_of(graph) or (len(graph.devices) > 1 and any(t.random for t in graph.tasks)):
        return (
            "it draws on several devices or from a generator of its own, which no replay moves on"
        )
    if not arenas.note or all(node.kind == TASK for node in memgraph.nodes):
        return ""
    return "a graph copies only page-locked memory of the host, and none could be had"


def _bind(
    memgraph: MemGraph,
    node: Node,
    arenas: Arenas,
    placement: str,
    placed: PlacementCounts,
    driver: Cuda | None,
) -> Run:
    if node.kind == TASK:
        device = memgraph.graph.tasks[node.task].device
        scratch = memgraph.scratch.get(device)
        return bind_task(memgraph.graph, node, arenas.tensors, placement, scratch, placed)
    source, target = (access.place for access in node.accesses)
    if driver is not None:
        return driver.copy(arenas.bytes(target), arenas.bytes(source))
    # It lets go of the interpreter, and leaves torch's threads to the compute lane.
    return partial(memmove, arenas.address(target), arenas.address(source), node.nbytes)


def program_of(graph: TaskGraph) -> Program:
    """The graph's program. A graph that was built by hand may have none: then it takes bytes, gives
    bytes, and its tensors are zeros at first."""
    if graph.program is not None:
        return graph.program

    def value(number: int) -> Value:
        return Value(number, torch.uint8, (graph.buffers[number].nbytes,), (1,))

    return Program(
        inputs=tuple(value(n) for n, b in enumerate(graph.buffers) if b.role is Role.INPUT),
        outputs=tuple(value(number) for number in graph.outputs),
        tensors={
            b.tensor: torch.zeros(b.nbytes, dtype=torch.uint8)
            for b in graph.buffers
            if b.persistent
        },
    )


def notes_on_failure(memgraph: MemGraph, record: Record) -> list[str]:
    """Describe a step that failed: where it ended, and what became of the parameters."""
    lines: list[str] = []
    if record.failed is not None:
        node = memgraph.nodes[record.failed]
        lines.append(f"in {memgraph.describe(record.failed)}, on lane {node.lane}")
    if record.under_way:
        names = ", ".join(_with_line(memgraph, node) for node in record.under_way)
        lines.append(f"the device reported it late, when its queues held {names}")
    updates = {n for n, node in enumerate(memgraph.nodes) if _is_update(node, memgraph.graph)}
    done = len(updates.intersection(record.finished))
    if updates:
        lines.append(
            f"{done} of {len(updates)} updates of this step had run: parameters and optimizer state"
            + (" may be half way to the next step" if done else " are those of the step before")
        )
    return lines


def _with_line(memgraph: MemGraph, number: int) -> str:
    node = memgraph.nodes[number]
    where = memgraph.graph.tasks[node.task].where if node.kind == TASK else ""
    return f"{memgraph.name(number)} ({where})" if where else memgraph.name(number)


def _add_remark(remarks: Remarks, text: str) -> None:
    """Warn once, and have `explain()` show it too."""
    if remarks.add(text):
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _is_update(node: Node, graph: TaskGraph) -> bool:
    """Whether the node changes what outlives the step. One that scales gradients does not, nor one
    that makes an optimizer's states, which the step before did not have."""
    if node.kind != TASK or graph.tasks[node.task].phase != "update":
        return False
    task = graph.tasks[node.task]
    calls = getattr(task.kernel, "calls", ())
    made = {value.buffer for call in calls for value in call.outputs if value is not None}
    return any(graph.buffers[b].persistent for b in task.writes if b not in made)
