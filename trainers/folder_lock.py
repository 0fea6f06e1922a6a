"""A folder belongs to one process at a time: two would write over each other's files.

The system frees what a process holds when it ends, in whatever way. Nothing here imports torch.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class HeldHere:
    """What this process holds, and no fork of it: a loader's worker may live a little longer than a
    run that was killed, and the run may go on meanwhile."""

    def __init__(self) -> None:
        self.opened: set[int] = set()

    def let_go(self) -> None:
        """Close them all, in a fork."""
        while self.opened:
            os.close(self.opened.pop())


held_here = HeldHere()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=held_here.let_go)


@contextmanager
def hold_folder(path: Path) -> Iterator[bool]:
    """Hold a folder or a file during this block. False: another process holds it already."""
    if sys.platform == "win32":  # where nothing is held
        yield True
        return
    import fcntl

    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    held_here.opened.add(opened)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        if opened in held_here.opened:  # a fork has closed it
            held_here.opened.remove(opened)
            os.close(opened)
