"""The least seconds of any plan with these residents. Pure.

    resident           |################|     no copy
    w, read first      h2d  | R w |           once at least, however large the horizons are
    w, written last    d2h          | O w |

Every buffer that is not resident begins a step on the host. If a device reads it before anything
has overwritten it, it is copied there once at least. If a device writes it last, it is copied back.
"""

from collections.abc import Collection, Mapping

from offload.graph.costs import Costs
from offload.graph.memgraph import OFFLOAD, RELOAD, Place
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.planning.simulator import least_seconds


def least_seconds_with(
    graph: TaskGraph, costs: Costs, resident: Collection[int], homes: Mapping[int, Place]
) -> float:
    """Seconds of the busiest lane, with the copies that no plan can do without."""
    seconds: dict[tuple[str, int], float] = {}
    for b, (first_reads, last_writes) in _by_devices(graph).items():
        buffer, home = graph.buffers[b], homes.get(b)
        on_host = b not in resident if home is None else home.arena == HOST
        if not on_host or buffer.device == HOST:
            continue
        kinds = [RELOAD] if first_reads else []
        kinds += [OFFLOAD] if last_writes and buffer.persistent else []
        for kind in kinds:
            key = kind, buffer.device
            seconds[key] = seconds.get(key, 0.0) + costs.of_copy(kind, buffer.nbytes)
    return max(least_seconds(graph, costs), *seconds.values(), 0.0)


def _by_devices(graph: TaskGraph) -> dict[int, tuple[bool, bool]]:
    """By buffer that exists before a step: whether its first task reads it on a device, and
    whether the last task that writes it does so on a device."""
    found: dict[int, tuple[bool, bool]] = {}
    for task in graph.tasks:
        on_device = task.lane != "host"
        for b in task.touches:
            buffer = graph.buffers[b]
            if not buffer.persistent and buffer.role is not Role.INPUT:
                continue
            first, last = found.get(b, (on_device and b in task.reads, False))
            found[b] = first, on_device if b in task.writes else last
    return found
