"""The memory that this process may still take: what the machine and its cgroups have left.

    this machine      what is free, and what the system would give up (MemAvailable)
    every cgroup      limit - in use + file cache that can be dropped      up to the root

In a container the machine's memory is not the container's.
"""

import os
from pathlib import Path

from loaders.workers.cpus import CGROUPS, MEMBERSHIP, groups_of

MEMINFO = Path("/proc/meminfo")
FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Files with limit and use, of cgroup version 2 and of version 1."""
GIVES_WAY = ("inactive_file", "active_file", "slab_reclaimable")
"""Lines of `memory.stat`. Version 1 adds up a group's children under `total_...`."""


def free_memory(
    cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO
) -> int:
    """The bytes that are left where they are fewest."""
    left = [_left_in(group) for group in groups_of("memory", cgroups, membership)]
    return min([_free(meminfo), *(each for each in left if each is not None)])


def _free(meminfo: Path) -> int:
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in(group: Path) -> int | None:
    """None: this cgroup has no limit."""
    for limit_file, use_file in FILES:
        if (group / limit_file).is_file() and (group / use_file).is_file():
            limit = (group / limit_file).read_text(encoding="ascii").strip()
            if limit == "max":
                return None
            used = int((group / use_file).read_text(encoding="ascii"))
            return max(0, int(limit) - max(0, used - _gives_way(group / "memory.stat")))
    return None


def _gives_way(stat: Path) -> int:
    lines = stat.read_text(encoding="ascii").splitlines() if stat.is_file() else []
    found = {name: int(value) for name, value in (line.split() for line in lines)}
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in GIVES_WAY)
