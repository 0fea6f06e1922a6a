"""How much memory this process may still take, and whether a plan fits into it.

    this machine      what is free, and what the system would give up (MemAvailable)
    this process      ulimit -d - its data                         not of files, which are no data
    every cgroup      limit - in use + file cache that can be dropped      up to the root
    ------------      the smallest of them is left

    a plan needs      its arenas - tensors that move into them + the largest of these a second time
                      + what kernels allocate outside of the arenas + what the step returns
    at the end        memory for all these tensors again, because they leave the arenas

A system that promises more memory than it has would kill the process in the middle of a step.
"""

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from offload.errors import MemoryTooSmall
from offload.graph.taskgraph import HOST, TaskGraph
from offload.memory.runnable import RunnablePlan
from offload.program.kernels import Value, device_of
from offload.sizes import say_size
from offload.torch_seams import pytree

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Files with limit and use, of cgroup version 2 and of version 1."""
GIVES_WAY = ("inactive_file", "active_file", "slab_reclaimable")
"""Lines of `memory.stat`. Version 1 adds up a group's children under `total_...`."""


@dataclass(frozen=True, slots=True)
class HostMemoryLeft:
    """Memory that this process may still take."""

    nbytes: int
    where: str
    """What sets this limit, in words."""


def memory_left(
    cgroups: Path = CGROUPS,
    membership: Path = MEMBERSHIP,
    meminfo: Path = MEMINFO,
    *,
    data: bool = True,
) -> HostMemoryLeft:
    """The smallest amount that the machine, the process's own limit of data and the cgroups leave.
    `data`: False for files in memory."""
    found = [_of_machine(meminfo), *(_of_process() if data else ())]
    found += [left for group in _groups(cgroups, membership) if (left := _of_group(group))]
    return min(found, key=lambda left: left.nbytes)


def _of_machine(meminfo: Path) -> HostMemoryLeft:
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            return HostMemoryLeft(
                free, f"{say_size(free)} of this machine's {say_size(there)} are free"
            )
    return HostMemoryLeft(there, f"this machine has {say_size(there)}")


def _of_process() -> Iterator[HostMemoryLeft]:
    """What the process's limit of data leaves. A mapping of a file is no data."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY or not STATUS.is_file():
        return
    lines = STATUS.read_text(encoding="ascii").splitlines()
    used = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    yield HostMemoryLeft(
        max(0, limit - used),
        f"this process may have {say_size(limit)} of data (ulimit -d), {say_size(used)} are in use",
    )


def _groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    """Folders of cgroups that may limit this process, of versions 2 and 1."""
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [cgroups, cgroups / "unified"]
        elif "memory" in controllers.split(","):
            mounts = [cgroups / "memory", cgroups / controllers]
        else:
            continue
        for mount in dict.fromkeys(mounts):
            group = mount / path.lstrip("/")
            # Inside a container the path may be the host's; then only the mount itself exists.
            yield from (f for f in (group, *group.parents) if f.is_relative_to(mount))


def _of_group(group: Path) -> HostMemoryLeft | None:
    for limit_file, use_file in FILES:
        if (group / limit_file).is_file() and (group / use_file).is_file():
            limit = (group / limit_file).read_text(encoding="ascii").strip()
            if limit == "max":
                return None
            use = int((group / use_file).read_text(encoding="ascii"))
            held = max(0, use - _gives_way(group / "memory.stat"))
            return HostMemoryLeft(
                max(0, int(limit) - held),
                f"the limit of this process's cgroup is {say_size(int(limit))}"
                f" ({group / limit_file}), {say_size(held)} of it are in use",
            )
    return None


def _gives_way(stat: Path) -> int:
    lines = stat.read_text(encoding="ascii").splitlines() if stat.is_file() else []
    found = {name: int(value) for name, value in (line.split() for line in lines)}
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in GIVES_WAY)


def check_memory(
    plan: RunnablePlan, arenas: Mapping[int, int], left: HostMemoryLeft, waiting: int = 0
) -> None:
    """Raise `MemoryTooSmall` unless there is memory for a plan's arenas, which may be larger, and
    for the place where `waiting` bytes of residents are parked."""
    graph, outside = plan.graph, plan.reserve
    if device_of(graph).type != "cpu":
        _check_host(plan, arenas.get(HOST, 0), left, waiting)
        return
    sizes = moving_sizes(plan)
    moving, twice = sum(sizes.values()), max(sizes.values(), default=0)
    returned = returned_bytes(graph)
    needed = max(sum(arenas.values()) - moving + twice + outside + returned, moving) + waiting
    if needed <= left.nbytes:
        return
    parts = [
        f"the arena of {'the host' if arena == HOST else f'device {arena}'} {say_size(nbytes)}"
        for arena, nbytes in sorted(arenas.items(), reverse=True)
        if nbytes
    ]
    parts += [f"residents while they are parked {say_size(waiting)}"] if waiting else []
    parts += [f"what the step returns {say_size(returned)}"] if returned else []
    parts += [f"kernels besides {say_size(outside)}"] if outside else []
    raise MemoryTooSmall(
        f"{say_size(needed)} of memory are needed, but only {say_size(left.nbytes)} are left:"
        f" {left.where}. {', '.join(parts)}; {say_size(moving)} of tensors move into the arenas"
        " and, at the end, out of them again. Make the batch smaller, allow recomputing,"
        " give a budget and a host_budget that fit together, or raise the limit\n\n"
        + plan.explain(),
        needed=needed,
        left=left.nbytes,
    )


def _check_host(plan: RunnablePlan, arena: int, left: HostMemoryLeft, waiting: int) -> None:
    """Check a plan for a device: its host arena and its waiting place are locked at once, before
    any tensor moves there."""
    nbytes = arena + waiting
    if nbytes > left.nbytes:
        parked = f" and {say_size(waiting)} of parked residents" if waiting else ""
        raise MemoryTooSmall(
            f"{say_size(nbytes)} of memory are needed for the arena of the host{parked}, but only"
            f" {say_size(left.nbytes)} are left: {left.where}. Give a host_budget or a larger"
            " budget of the device, make the batch smaller, or raise the limit\n\n"
            + plan.explain(),
            needed=nbytes,
            left=left.nbytes,
        )


def moving_sizes(plan: RunnablePlan) -> dict[str, int]:
    """The bytes of every tensor that moves into the arenas and, at the end, out of them again."""
    sizes: dict[str, int] = {}
    for b in plan.memgraph.starts:
        buffer = plan.graph.buffers[b]
        if buffer.persistent:
            sizes[buffer.tensor] = sizes.get(buffer.tensor, 0) + buffer.nbytes
    return sizes


def returned_bytes(graph: TaskGraph) -> int:
    """The bytes of a step's outputs."""
    if graph.program is None:
        return sum(graph.buffers[b].nbytes for b in graph.outputs)
    leaves = pytree.tree_leaves(graph.program.outputs)
    return sum(prod(v.size) * v.dtype.itemsize for v in leaves if isinstance(v, Value))
