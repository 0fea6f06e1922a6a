"""How many CPUs this rank may use, which `workers="auto"` means, and how much memory is free.

    CPUs      what the process may run on, what its cgroup allows, divided by the ranks here
    memory    the least of what the machine (MemAvailable) and each cgroup up to the root have left

`os.cpu_count()` says neither: in a container with 4 of 128 CPUs it is 128.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from loaders.errors import LoaderError
from loaders.order.tuning import available_cpus

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cpus(local_ranks: int | None = None) -> int:
    """The CPUs that this rank may use. `local_ranks` is the number of ranks that share this
    machine; None: the launcher says it in LOCAL_WORLD_SIZE."""
    if hasattr(os, "sched_getaffinity"):
        affinity = len(os.sched_getaffinity(0))
    else:
        affinity = os.cpu_count() or 1
    ranks = launched_ranks() if local_ranks is None else local_ranks
    return available_cpus(affinity, cpu_quota(CGROUPS, MEMBERSHIP), ranks)


def cpu_quota(cgroups: Path, membership: Path) -> tuple[int, int] | None:
    """The tightest (quota, period) of this process's cgroup and those above it. None: no limit."""
    tightest = None
    for folder in groups_of("cpu", cgroups, membership):
        quota = _quota_of(folder)
        if quota and (tightest is None or quota[0] * tightest[1] < tightest[0] * quota[1]):
            tightest = quota
    return tightest


def groups_of(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """The folders that may hold limits for this process, of cgroups version 2 and version 1."""
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [cgroups, cgroups / "unified"]
        elif controller in controllers.split(","):
            mounts = [cgroups / controllers, cgroups / controller]
        else:
            continue
        for mount in mounts:
            group = mount / path.lstrip("/")
            # Inside a container the path may be the host's. Then only the mount itself exists.
            yield from (f for f in (group, *group.parents) if f.is_relative_to(mount))


def _quota_of(group: Path) -> tuple[int, int] | None:
    if (group / "cpu.max").is_file():
        quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
    elif (group / "cpu.cfs_quota_us").is_file():
        quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
        period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
    else:
        return None
    return None if quota in ("max", "-1") else (int(quota), int(period))


def launched_ranks() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise LoaderError(
            f"the launcher's LOCAL_WORLD_SIZE is '{ranks}', which is not a number of ranks on this"
            " machine: set it to a whole number from 1, or leave it out"
        )
    return int(ranks)


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
    sizes = {name: int(value) for name, value in (line.split() for line in lines)}
    return sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in GIVES_WAY)
