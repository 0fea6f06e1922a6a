"""What a process and its children cost: CPU seconds, memory, and when they have come to rest.

CPU seconds of a child that lives come from its own clock (nanoseconds; /proc counts hundredths of a
second), those of one that was waited for from rusage. A loader may work ahead for its next pass
after this one has ended: so a pass costs what is used from rest to rest, not from first to last
batch. Linux only.
"""

import os
import resource
import time
from pathlib import Path

REST = 0.02
"""Seconds between two looks at whether anything still runs."""
BURN = 0.02
"""At rest: less of a core than this."""


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue  # it ended meanwhile
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    open_ = [pid]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def clock(pid: int) -> float:
    """CPU seconds of a living process, all its threads, dead ones too."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid() of the C library
    except OSError:
        return 0.0  # it ended meanwhile


class Meter:
    """CPU seconds of this process and everything below it, less what the looking costs."""

    def __init__(self) -> None:
        self._looking = 0.0

    def cpu(self) -> float:
        started = time.thread_time()
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        living = sum(clock(pid) for pid in descendants(os.getpid()))
        self._looking += time.thread_time() - started
        return time.process_time() + reaped.ru_utime + reaped.ru_stime + living - self._looking

    def rest(self, patience: float = 3.0) -> tuple[float, float]:
        """Waits until nothing runs any more, at most `patience`. CPU seconds as of then, and when
        (of time.perf_counter) something was last seen to run."""
        until = time.monotonic() + patience
        before, busy = self.cpu(), time.perf_counter()
        while True:
            time.sleep(REST)
            now = self.cpu()
            if now - before < BURN * REST or time.monotonic() > until:
                return now, busy
            before, busy = now, time.perf_counter()


def peak_memory() -> dict[str, float]:
    """MiB: the most this process ever held, and what its children hold alone now."""
    children = sum(_private(pid) for pid in descendants(os.getpid()))
    # Not rusage's: that one is inherited from whoever started this process.
    status = Path("/proc/self/status").read_text()
    return {"own": _kib(status, "VmHWM:") / 1024, "children": children / 1024}


def _private(pid: int) -> int:
    """KiB of a process that it shares with nobody (a fork shares its parent's pages)."""
    try:
        return _kib(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Private_")
    except OSError:
        return 0


def _kib(text: str, key: str) -> int:
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(key))
