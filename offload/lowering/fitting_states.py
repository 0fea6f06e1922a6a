"""Chooses the optimizer's states that stay on their devices, if those of others are on the host.
Pure.

    device 7   | weights | sums | activations of few micro-batches |  states that fit          |
    device 0   | weights | sums | activations of many micro-batches           | states that fit |

Devices that begin a step later have fewer micro-batches under way, so they have more room. An
update whose states stay runs on its device, and costs neither copies nor time of the host.
"""

from collections.abc import Mapping

from offload.graph.taskgraph import UPDATE, Role, TaskGraph
from offload.planning.wanted import peak_bytes

SPARE = 0.05
"""The share of a device that stays free, because blocks of several sizes leave gaps."""


def find_fitting_states(graph: TaskGraph, capacities: Mapping[int, int]) -> frozenset[int]:
    """The states that fit beside everything else: of the step's last updates first, which the host
    would end last."""
    others = bytes_beside_states(graph)
    left = {d: capacities[d] * (1 - SPARE) - nbytes for d, nbytes in others.items()}
    seen, fitting = set[int](), set[int]()
    for task in reversed(graph.tasks):
        states = {b for b in task.writes if graph.buffers[b].role is Role.STATE} - seen
        seen |= states
        nbytes = sum(graph.align(graph.buffers[b].nbytes) for b in states)
        if states and nbytes <= left[task.device]:
            left[task.device] -= nbytes
            fitting |= states
    return frozenset(fitting)


def bytes_beside_states(graph: TaskGraph) -> dict[int, int]:
    """By device: the bytes that it needs before the updates if nothing ever leaves it."""
    others = graph.with_tasks([task for task in graph.tasks if task.phase != UPDATE])
    return {device: peak_bytes(others, device) for device in graph.devices}
