"""The peak of the memory that a process and all its descendants take, shared pages counted once.

It is sampled: a peak that is shorter than the interval is missed.
"""

import os
import re
import threading
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")


def descendants(root: int) -> set[int]:
    """Return the ids of `root` and of all processes below it."""
    parents: dict[int, int] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(fields[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def taken(pids: set[int]) -> int:
    """Return the bytes of these processes. A page of several counts for each with its part."""
    total = 0
    for pid in pids:
        try:
            text = (PROC / str(pid) / "smaps_rollup").read_text()
        except OSError:
            continue
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        total += int(found[1]) * 1024 if found else 0
    return total


class TreeMemory:
    """A context manager. `peak`: the bytes of this process and its descendants."""

    def __init__(self, seconds: float = 0.2) -> None:
        self.peak = 0
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tree-memory", daemon=True)

    def __enter__(self) -> "TreeMemory":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._seconds):
            self.peak = max(self.peak, taken(descendants(os.getpid())))
