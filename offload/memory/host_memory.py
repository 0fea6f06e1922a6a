"""How much of the host's memory this process may still take.

    this machine      what is free, and what the system would give up (MemAvailable)
    this process      ulimit -d - its data                         not of files, which are no data
    every cgroup      limit - in use + file cache that can be dropped      up to the root
    ------------      the smallest of them is left

A system that promises more memory than it has would kill the process in the middle of a step.
"""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.sizes import format_size

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
    limits = [_of_machine(meminfo), *(_of_process() if data else ())]
    limits += [left for group in _groups(cgroups, membership) if (left := _of_group(group))]
    return min(limits, key=lambda left: left.nbytes)


def _of_machine(meminfo: Path) -> HostMemoryLeft:
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            return HostMemoryLeft(
                free, f"{format_size(free)} of this machine's {format_size(there)} are free"
            )
    return HostMemoryLeft(there, f"this machine has {format_size(there)}")


def _of_process() -> Iterator[HostMemoryLeft]:
    """What the process's limit of data leaves. A mapping of a file is no data."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY or not STATUS.is_file():
        return
    lines = STATUS.read_text(encoding="ascii").splitlines()
    used = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    yield HostMemoryLeft(
        max(0, limit - used),
        f"this process may have {format_size(limit)} of data (ulimit -d), {format_size(used)} are"
        " in use",
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
            used = max(0, use - _gives_way(group / "memory.stat"))
            return HostMemoryLeft(
                max(0, int(limit) - used),
                f"the limit of this process's cgroup is {format_size(int(limit))}"
                f" ({group / limit_file}), {format_size(used)} of it are in use",
            )
    return None


def _gives_way(stat: Path) -> int:
    lines = stat.read_text(encoding="ascii").splitlines() if stat.is_file() else []
    numbers = {name: int(value) for name, value in (line.split() for line in lines)}
    return sum(numbers.get(f"total_{name}", numbers.get(name, 0)) for name in GIVES_WAY)
