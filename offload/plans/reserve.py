"""The bytes that a plan needs outside of its arena.

On a CUDA device they come from PyTorch's caching allocator, which takes more than is asked of it:

    a piece    <= 1 MiB   < 10 MiB   more
    a segment     2 MiB     20 MiB   the next multiple of 2 MiB

A budget is bytes of the device, so what lies outside of the arena is counted in segments. The sizes
of the pieces are unknown, so the result is rather too large than too small.
"""

from offload.graph.taskgraph import Task, TaskGraph
from offload.program.kernels import CPU, device_of

MIB = 1 << 20
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, STEP = MIB, 2 * MIB, 20 * MIB, 2 * MIB


def segment_bytes(nbytes: int) -> int:
    """The bytes that the allocator takes for pieces of `nbytes` together."""
    if nbytes <= 0:
        return 0
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return max(LARGE_SEGMENT, -(-nbytes // STEP) * STEP)


def bytes_outside_arena(most: int, fixed: int) -> int:
    """The bytes that it takes outside of the arena.

    `most`: what one kernel allocates and frees; `fixed`: what libraries keep. The arena is rounded
    up, too, and small tensors that a step returns need a segment."""
    return segment_bytes(most) + segment_bytes(fixed) + STEP + SMALL_SEGMENT


def reserve_bytes(graph: TaskGraph, placement: str) -> int:
    """The bytes that a plan needs outside of the arena: the most that one kernel allocates there.
    On a CUDA device also what libraries keep, and what the allocator adds by rounding."""
    tasks, device = graph.tasks, device_of(graph)
    if device != CPU:  # tasks on the host do not allocate on the device
        tasks = [task for task in tasks if task.lane != "host"]
    most = max((_bytes_of_kernel(task, placement) for task in tasks), default=0)
    if device != CPU:
        return bytes_outside_arena(most, graph.program.fixed)
    return graph.align(most) if most else 0


def _bytes_of_kernel(task: Task, placement: str) -> int:
    calls = getattr(task.kernel, "calls", ())
    if placement == "copy" or any(call.allocations is None for call in calls):
        return task.unplaced
    return task.stray
