"""The folder of multiprocessing's fork server. A process that is killed leaves it behind.

/tmp/pymp-abcd/listener-wxyz       the server's socket, of multiprocessing
               perfect-training    our mark: no other folder is removed
"""

import multiprocessing
import os
import shutil
import socket
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

MARK = "perfect-training"


def prepare(module: str) -> None:
    """Let this process's server import a module once. Remove the folders of dead ones."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([module])
    mine = Path(util.get_temp_dir()) / MARK
    if not mine.exists():
        mine.touch()
        for mark in mine.parents[1].glob(f"pymp-*/{MARK}"):
            with suppress(OSError):  # Another process may remove it, too.
                if mark.parent.lstat().st_uid == os.getuid() and _is_dead(mark.parent):
                    shutil.rmtree(mark.parent)


def _is_dead(folder: Path) -> bool:
    """Whether nobody has the socket. One of another type asks, and disturbs no server."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        try:
            for server in folder.glob("listener-*"):
                asking.connect(str(server))
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
    return False
