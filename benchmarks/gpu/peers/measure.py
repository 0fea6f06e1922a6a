"""One cell: this process becomes the peer, within what the ballast leaves of the device.

    ballast ... | free = budget + spare | build | 3 steps | 5 timed | watch: device, host | row

What cannot be had (not installed, too large, refused) is the cell's problem and the table's line.
"""

import importlib
import importlib.metadata
import importlib.util
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.ballast import Ballast, BallastError
from benchmarks.gpu.memory_watch import MemoryWatch, counter
from benchmarks.gpu.part import Job, Row, Rows
from benchmarks.gpu.peers.roster import PEERS, Peer
from benchmarks.gpu.peers.task import GIB, MIB, Running, Setup, Task, ladder, tasks
from benchmarks.gpu.timing import REPEATS, WARM_UP, timed
from benchmarks.harness.process import read_memory_mib
from offload import OffloadError
from offload.memory.host_memory import memory_left

CGROUP = Path("/sys/fs/cgroup")
PERIOD, HOST_PERIOD = 0.005, 0.02
"""Seconds between two looks at the device's memory, and at the cgroup's."""
BEYOND = (OffloadError, BallastError, torch.OutOfMemoryError, MemoryError)
"""Of these the process is still whole. Any other error ends it: the frame tells its last words."""


def compared(job: Job) -> Rows:
    for cell in job.cells:
        task, budget, name = cell.split("; ")
        yield cell, attempt(PEERS[name], tasks(job.smoke)[task], budget, job, WARM_UP, REPEATS)


def largest(job: Job) -> Rows:
    """Whether it trains at all: two steps to warm up, one that counts."""
    for cell in job.cells:
        task, budget, name = cell.split("; ")
        yield cell, attempt(PEERS[name], ladder(job.smoke)[task], budget, job, 2, 1)


def attempt(peer: Peer, task: Task, budget: str, job: Job, warm_up: int, repeats: int) -> Row:
    """`budget`: "8 GiB", or "none"."""
    if why := refused(peer, task, job.device):
        return {"problem": why}
    nbytes = None if budget == "none" else round(float(budget.partition(" ")[0]) * GIB)
    try:
        with ExitStack() as stack:
            held = nbytes if job.device == "cuda" else None
            if held is not None:
                stack.enter_context(Ballast(held))
            made = function_of(peer)(Setup(task, nbytes, job.device))
            return {"version": version(peer), **run(made, job.device, warm_up, repeats)}
    except BEYOND as error:
        said = str(error).partition("\n")[0]
        return {"problem": f"does not run within {budget}: {type(error).__name__}: {said}"}


def refused(peer: Peer, task: Task, device: str) -> str:
    """Why it is not even tried; empty: it is."""
    if gone := [name for name in peer.needs if importlib.util.find_spec(name) is None]:
        return f"not installed: {', '.join(gone)} (benchmarks/gpu/wheels.sh)"
    if device == "cpu" and not peer.on_cpu:
        return "needs a CUDA device"
    left = memory_left().nbytes / GIB
    if task.host_gib > left:
        return f"{task.host_gib:.0f} GiB of host memory are needed, {left:.0f} GiB are left"
    return ""


def function_of(peer: Peer) -> Callable[[Setup], AbstractContextManager[Running]]:
    module, _, name = peer.run.partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), name)


def version(peer: Peer) -> str:
    if not peer.needs:
        return f"torch {torch.__version__}"
    return f"{peer.needs[0]} {importlib.metadata.version(peer.needs[0])}"


def run(
    made: AbstractContextManager[Running], device: str, warm_up: int, repeats: int
) -> Row:  # fmt: skip
    """Build it, step it, and what both cost at the most."""
    who, used = counter(device)
    results: list[torch.Tensor] = []
    with MemoryWatch(used, PERIOD) as taken, MemoryWatch(in_group, HOST_PERIOD) as host:
        base, host_base = taken.begin(), host.begin()
        with made as running:
            built = taken.most() - base
            taken.begin()
            seconds = [
                timed(lambda: results.append(running.step().detach()), device)
                for _ in range(warm_up + repeats)
            ][warm_up:]
            facts = dict(running.facts)
        most = taken.most() - base
        group = host.most() - host_base
    row: Row = {
        "median": statistics.median(seconds), "values": seconds, "counter": who,
        "device_mib": most / MIB, "built_mib": built / MIB,
        "group_mib": group / MIB, "rss_mib": read_memory_mib(), "pinned_mib": pinned() / MIB,
        "first": float(results[0]), "last": float(results[-1]),
    }  # fmt: skip
    if device == "cuda":
        row["torch_mib"] = torch.cuda.max_memory_allocated() / MIB
    return row | facts


def in_group() -> int:
    """Bytes that this process's cgroup holds, pinned memory too. 0 where there is none."""
    membership = Path("/proc/self/cgroup")
    lines = membership.read_text().splitlines() if membership.is_file() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in (CGROUP / own, CGROUP):
        if (folder / "memory.current").is_file():
            return int((folder / "memory.current").read_text())
    return 0


def pinned() -> int:
    """By torch's own allocator: what it took, rounded up as it does."""
    stats: dict[str, Any] = {}
    if torch.cuda.is_initialized() and hasattr(torch.cuda, "host_memory_stats"):
        stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.peak", 0))
