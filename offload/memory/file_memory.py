"""Memory of the host that is a file: the system writes its pages to a disk when others need RAM.

    folder/.offload-...   posix_fallocate     a full disk is refused now, and not in the middle of
          |                                   a step, where the process would die of SIGBUS
          v
    unlinked, mapped shared                   nobody finds the file, and it ends with the process

A shared mapping of a file does not count for `ulimit -d` (RLIMIT_DATA), and it may be larger than
the machine's RAM. A file in a tmpfs is RAM, and counts as such (room.py).

A process that is forked does not get these bytes: it would share them, so that what it writes would
change the training run. Reading them there ends that process, as with page-locked memory.
"""

import errno
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from offload.errors import MemoryTooSmall, OffloadError
from offload.sizes import format_size

MOUNTS = Path("/proc/self/mountinfo")


def check_folder(host_dir: str | Path) -> Path:
    """Return the folder of `host_dir`. Raise `ValueError` if no file can be made there."""
    folder = Path(host_dir).expanduser()
    if not folder.is_dir():
        raise ValueError(f"host_dir={str(host_dir)!r} is not a folder: make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"host_dir={str(host_dir)!r} may not be written to: change its rights, or give another"
            " folder"
        )
    return folder


def is_ram(host_dir: str | Path) -> bool:
    """Whether files in this folder are RAM, as in a tmpfs. Making one in no folder is refused."""
    folder = Path(host_dir).expanduser()
    if not (folder.is_dir() and MOUNTS.is_file()):
        return False
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.partition(" - ") for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    kinds = {kind.split()[0] for where, _, kind in mounts if where.split()[2] == number}
    return bool(kinds & {"tmpfs", "ramfs"})


def map_file(folder: Path, nbytes: int) -> memoryview:
    """Map a new file of `nbytes` in this folder, which has no name there. It is gone with the last
    view of these bytes, and with the process."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".offload-") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        raise _refusal(folder, nbytes, error) from error
    with suppress(OSError):
        memory.madvise(mmap.MADV_DONTFORK)
    return memoryview(memory)


def _refusal(folder: Path, nbytes: int, error: OSError) -> OffloadError:
    what = (
        f"{format_size(nbytes)} for the arena of the host were refused in host_dir={str(folder)!r}"
    )
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OffloadError(f"{what} ({error}): give another folder")
    stat = os.statvfs(folder)
    left = stat.f_bavail * stat.f_frsize
    return MemoryTooSmall(
        f"{what} ({error.strerror}), where {format_size(left)} are free: make room there, give a"
        " folder on another disk, or make the batch smaller",
        needed=nbytes,
        left=left,
    )
