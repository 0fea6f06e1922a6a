"""The folder of multiprocessing's fork server. A process that is killed leaves it behind.

/tmp/pymp-abcd/listener-wxyz       the server's socket, of multiprocessing
               perfect-training    locked as long as the folder is used; no other folder is removed
"""

import fcntl
import multiprocessing
import os
import shutil
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

MARK = "perfect-training"


def prepare(module: str) -> None:
    """Let this process's server import a module once. Remove the folders of dead processes."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([module])
    mine = Path(util.get_temp_dir()) / MARK
    if not mine.exists():
        begun = mine.with_suffix(".begun")
        _lock(os.open(begun, os.O_CREAT | os.O_RDWR, 0o600))  # until this process ends
        begun.rename(mine)  # so nobody sees the mark without its lock
        for mark in mine.parents[1].glob(f"pymp-*/{MARK}"):
            with suppress(OSError):  # It is in use, or another process removes it, too.
                _remove_unlocked(mark)


def _remove_unlocked(mark: Path) -> None:
    if mark.parent.lstat().st_uid != os.getuid():
        return
    file = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
    try:
        _lock(file)
        shutil.rmtree(mark.parent)
    finally:
        os.close(file)


def _lock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
