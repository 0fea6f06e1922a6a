"""Looks through a folder of pictures: the names of all files below it, sorted, folder by folder.

Only folders are opened, and no file is looked at. Names stay text until somebody asks for a path:
a million `Path`s take longer to make than the walk itself, and 300 bytes each.

Long walks say every few seconds how far they have come.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

log = logging.getLogger(__name__)

SAY_EVERY = 5.0
"""Seconds between two lines about a walk that is still under way."""


@dataclass(frozen=True, slots=True)
class FilePaths(Sequence[Path]):
    """The paths of files whose names are known."""

    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> "FilePaths": ...
    def __getitem__(self, index: int | slice) -> "Path | FilePaths":
        if isinstance(index, slice):
            return FilePaths(self.names[index])
        return Path(self.names[index])


@dataclass(slots=True)
class FolderWalk:
    """One walk below `root`."""

    root: Path
    clock: Callable[[], float] = time.monotonic
    _files: int = 0
    _folders: int = 0
    _said: float | None = None
    _entered: set[str] = field(default_factory=set[str])

    def below(self, folder: str) -> Iterator[str]:
        """All files below a folder, in the order of the parts of their names, also those in folders
        that links lead to. No folder above is entered again."""
        self._entered.clear()
        yield from self._below(folder)

    def _below(self, folder: str) -> Iterator[str]:
        self._entered.add(os.path.realpath(folder))
        try:
            with os.scandir(folder) as found:
                entries = {entry.path: _is_folder(entry) for entry in found}
        except PermissionError as error:
            log.warning("%s: nobody may look into this folder, so it is left out", error.filename)
            return
        # Folders that are entered from here must not keep each other from being entered.
        left_out = {
            path
            for path, is_folder in entries.items()
            if is_folder and os.path.realpath(path) in self._entered
        }
        self._tell(len(entries))
        for path in sorted(entries):
            if not entries[path]:
                yield path
            elif path not in left_out:
                yield from self._below(path)

    def _tell(self, entries: int) -> None:
        self._files, self._folders = self._files + entries, self._folders + 1
        now = self.clock()
        if self._said is None:
            self._said = now
        elif now - self._said >= SAY_EVERY:
            self._said = now
            log.info(
                "%s: looked through %d folders with %d entries so far",
                self.root,
                self._folders,
                self._files,
            )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False
