"""What a step needs that runs as it is issued, and the budget to give where that is too much.

tape --> graph --> bytes at once        what the device, or this machine, lacks
               --> its largest task     the least that any budget must hold

No kernel runs for this, so what kernels allocate for themselves is not counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.errors import MemoryTooSmall
from offload.graph.taskgraph import TaskGraph
from offload.live.graphs import Weight, graph_of
from offload.live.tape_calls import TapeReader
from offload.live.weights import LiveWeights
from offload.memory.device_memory import device_left
from offload.memory.host_memory import memory_left
from offload.planning.refusal import smallest_budget
from offload.plans.plan import largest_peak, reserve_of
from offload.sizes import format_size

SPARE = 1 / 16
"""The share of a device that the budget leaves to rounding, and to what kernels allocate."""
GIB = 1 << 30


def graph_as_issued(core: Any, tape: Any, weights: LiveWeights) -> TaskGraph:
    """A graph of all that was issued, whether it has run or not. Nothing is adopted for it."""
    reader = TapeReader(core, tape, (), weights.device, whole=True)
    given = [slot for slot, origin in enumerate(tape.origins) if origin == core.GIVEN]
    there = {slot for slot, origin in enumerate(tape.origins) if origin >= 0} | {*given}
    known = {
        slot: Weight(name, role, torch.empty(0))
        for tensor, name, role in weights.list_named()
        for slot in tape.slots_of([tensor])
        if slot in there
    }
    return graph_of(reader, given, known, {*tape.held}, ())[0]


def refuse_on_device(
    graph: TaskGraph,
    device: torch.device,
    passes: Sequence[Callable[[TaskGraph], TaskGraph]],
    *,
    part: bool,
) -> MemoryTooSmall:
    """What to say where a device's allocator has failed. `passes`: those of plans, which cut large
    tasks. `part`: whether only the beginning of the step is known."""
    needed, inputs = largest_peak(graph), sum(value.size[0] for value in graph.program.inputs)
    for run_pass in passes:
        graph = run_pass(graph)
    left = device_left(device)
    room = left.free + left.ours
    most = _floor(int(room * (1 - SPARE)) - 2 * inputs)  # the next batch comes beside this one
    least, task = smallest_budget(graph, 0)
    least += reserve_of(graph)
    return MemoryTooSmall(
        f"{'the part of this step before its error' if part else 'this step'} needs"
        f" {format_size(needed)} of {device} without a budget, beside what its"
        f" kernels allocate for themselves, and {format_size(room)} are there: "
        + _advise(most, least, f"its largest task{' so far' if part else ''}, {task}"),
        needed=needed,
        left=room,
    )


def _floor(nbytes: int) -> float:
    """GiB with two places."""
    return nbytes * 100 // GIB / 100


def _advise(most: float, least: int, task: str) -> str:
    largest = f"{task}, needs {format_size(least)}"
    if least > most * GIB:
        return f"make the batch smaller, as no budget is enough: {largest}"
    return f"give budget='{most:g}GiB', or less ({largest})"


def check_machine(tape: Any, read_graph: Callable[[], TaskGraph]) -> None:
    """Raise `MemoryTooSmall` before a step of the CPU whose results this machine cannot hold: the
    system would end the process in the middle of it."""
    left = memory_left()
    made = {value.slot: value.nbytes for node in tape.nodes for value in node.made if value}
    if sum(made.values()) <= left.nbytes:
        return
    graph = read_graph()
    there = sum(graph.align(buffer.nbytes) for buffer in graph.buffers if buffer.persistent)
    needed = largest_peak(graph) - there
    if needed > left.nbytes:
        raise MemoryTooSmall(
            f"this step needs {format_size(needed)} of memory beside its weights, and only"
            f" {format_size(left.nbytes)} are left: {left.where}. Make the batch smaller, or give"
            " host_dir=, a folder on a disk, and a budget, such as"
            f" budget='{_floor(left.nbytes // 2)}GiB'",
            needed=needed,
            left=left.nbytes,
        )
