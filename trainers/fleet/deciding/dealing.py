"""Assigns jobs to nodes: the longest job first, to the node that would end it first.

    work    a 8   b 5   c 4   d 3            node 0 (speed 2)   a a a a c c        done at 6
                                             node 1 (speed 1)   b b b b b d d d    done at 8

The last job ends at most twice as late as in the best possible assignment (Gonzalez, Ibarra and
Sahni, "Bounds for LPT Schedules on Uniform Processors", 1977).
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from offload.sizes import format_count
from trainers.fleet.deciding.fleet_error import FleetError

NOTHING: Mapping[str, float] = MappingProxyType({})


def deal(
    work: Mapping[str, float], speeds: Mapping[str, float], loads: Mapping[str, float] = NOTHING
) -> Mapping[str, tuple[str, ...]]:
    """Return the jobs of each node, its longest first. `work`: of each job, in any unit. `speeds`:
    the work that each node does in a unit of time. `loads`: the work that nodes have already."""
    if not speeds:
        raise FleetError(f"there is no node for {format_count(len(work), 'job')}: start one")
    for job, amount in work.items():
        if not 0 <= amount < math.inf:
            raise FleetError(f"job {job} was given work={amount!r}: give a number of 0 or more")
    for node, speed in speeds.items():
        if not 0 < speed < math.inf:
            raise FleetError(f"node {node} has the speed {speed!r}: give a number above 0")
    load = {node: loads.get(node, 0.0) for node in speeds}
    dealt: dict[str, list[str]] = {node: [] for node in speeds}
    for job in sorted(work, key=lambda name: -work[name]):  # equal ones in the order of adding
        node = min(speeds, key=lambda name: (load[name] + work[job]) / speeds[name])
        dealt[node].append(job)
        load[node] += work[job]
    return {node: tuple(jobs) for node, jobs in dealt.items()}
