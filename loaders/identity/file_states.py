"""The state of files: size, time of change, inode. Any change to a file changes one of them.

    a file      its own state
    a folder    the states of all files below it, with their names relative to it

100,000 files take about a second on a local disk whose folders are in the page cache. Every file is
looked up once.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_ENTRIES = 2_000_000
"""A folder with more files than this is refused."""
LOOKS_LIKE_A_FILE = re.compile(r"[^\n\0]*(?:/[^\n\0]*|\.\w{1,8})")
LONGEST_NAME = 4096
IGNORED_FOLDERS = frozenset({"__pycache__"})


class FolderTooLarge(Exception):
    """A folder has more than `MOST_ENTRIES` files."""


def may_name_a_file(text: str) -> bool:
    """Whether a string in a list may be the name of a file: it has a slash or a suffix."""
    return len(text) <= LONGEST_NAME and LOOKS_LIKE_A_FILE.fullmatch(text) is not None


@dataclass(slots=True)
class FileStates:
    """The states of files, each looked up once. The folder `ignored` (a cache) is left out."""

    ignored: Path | None = None
    _known: dict[str, str] = field(default_factory=dict)

    def file_state(self, name: str) -> str:
        """The state of a file. Empty: there is no such file, or it is a folder."""
        parent = name.rpartition("/")[0]
        # Most strings with a slash name no file: their folder does not exist either.
        if name not in self._known and parent and not self._state(parent):
            self._known[name] = ""
        known = self._state(name)
        return "" if known == "folder" else known

    def _state(self, name: str) -> str:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _state_of(name)
        return known

    def file_states(self, name: str) -> Iterator[str]:
        """The state of a file, or those of all files in a folder, in the order of their names."""
        if state := self.file_state(name):
            yield state
        elif self._known[name] == "folder" and name.strip("/"):
            yield from self._folder_states(name)

    def _folder_states(self, root: str) -> Iterator[str]:
        ignored = None if self.ignored is None else os.path.realpath(self.ignored)
        entered: set[tuple[int, int]] = set()
        folders, entries = [(root, "")], 0
        while folders:
            folder, prefix = folders.pop()
            try:
                status = os.stat(folder)
                listing = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError as error:
                yield f"{prefix}\0{error.errno}"
                continue
            if (status.st_dev, status.st_ino) in entered or os.path.realpath(folder) == ignored:
                continue
            entered.add((status.st_dev, status.st_ino))
            entries += len(listing)
            if entries > MOST_ENTRIES:
                raise FolderTooLarge
            for entry in listing:
                if entry.is_dir():
                    if entry.name not in IGNORED_FOLDERS:
                        folders.append((entry.path, f"{prefix}{entry.name}/"))
                    continue
                yield f"{prefix}{entry.name}\0{self._state(entry.path)}"


def _state_of(name: str) -> str:
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        return ""
    if stat.S_ISDIR(status.st_mode):
        return "folder"
    return f"{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
