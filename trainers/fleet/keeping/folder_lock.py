"""A folder belongs to one process at a time: two would write over each other's journal.

The system frees the lock when the process ends, in whatever way. Processes that it has started do
not hold it.
"""

from pathlib import Path
from typing import IO

from trainers.fleet.deciding.fleet_error import FleetError

NAME = "fleet.lock"


class FolderLock:
    """Call `take`, and `free` at the end. `free` may be called again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def take(self) -> None:
        """Make the folder this process's. Raise `FleetError` if another process has it."""
        import fcntl  # Windows has none

        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / NAME).open("wb")
        try:
            # Not flock: a loader's worker is a fork, and would hold that after this process's end.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise FleetError(
                f"another process runs the fleet of {self._folder}: wait for its end, end it with"
                " Ctrl-C, or give another folder"
            ) from error
        self._file = file

    def free(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
