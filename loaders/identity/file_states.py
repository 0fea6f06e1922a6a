"""The state of files: size, time of change, inode. Whoever changes a file changes one of them.

    a file      its own state
    a folder    the states of all files below it, by their names below it

100,000 files take about a second on a local disk whose folders were read before. Every file is
looked at once.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_ENTRIES = 2_000_000
"""A folder with more files than this is not looked through."""
LOOKS_LIKE_A_FILE = re.compile(r"[^\n\0]*(?:/[^\n\0]*|\.\w{1,8})")
LONGEST_NAME = 4096
PASSED_OVER = frozenset({"__pycache__"})


class FolderTooLarge(Exception):
    """A folder has more than `MOST_ENTRIES` files."""


def may_be_a_file(text: str) -> bool:
    """Whether a word in a list may be the name of a file: it has a slash or a suffix."""
    return len(text) <= LONGEST_NAME and LOOKS_LIKE_A_FILE.fullmatch(text) is not None


@dataclass(slots=True)
class FileStates:
    """Looks at files. `ignored` is a folder that is no part of what is looked at (a cache)."""

    ignored: Path | None = None
    _known: dict[str, str] = field(default_factory=dict)

    def of_file(self, name: str) -> str:
        """The state of a file. Empty: there is no such file, or it is a folder."""
        above = name.rpartition("/")[0]
        # Most words with a slash are no files, and nothing is there to be asked.
        if name not in self._known and above and not self._state(above):
            self._known[name] = ""
        known = self._state(name)
        return "" if known == "folder" else known

    def _state(self, name: str) -> str:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _state_of(name)
        return known

    def of(self, name: str) -> Iterator[str]:
        """The state of a file, or those of all files in a folder, in the order of their names."""
        if state := self.of_file(name):
            yield state
        elif self._known[name] == "folder" and name.strip("/"):
            yield from self._below(name)

    def _below(self, root: str) -> Iterator[str]:
        ignored = None if self.ignored is None else os.path.realpath(self.ignored)
        entered: set[tuple[int, int]] = set()
        folders, entries = [(root, "")], 0
        while folders:
            folder, below = folders.pop()
            try:
                place = os.stat(folder)
                found = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError as error:
                yield f"{below}\0{error.errno}"
                continue
            if (place.st_dev, place.st_ino) in entered or os.path.realpath(folder) == ignored:
                continue
            entered.add((place.st_dev, place.st_ino))
            entries += len(found)
            if entries > MOST_ENTRIES:
                raise FolderTooLarge
            for entry in found:
                if entry.is_dir():
                    if entry.name not in PASSED_OVER:
                        folders.append((entry.path, f"{below}{entry.name}/"))
                    continue
                yield f"{below}{entry.name}\0{self._state(entry.path)}"


def _state_of(name: str) -> str:
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return ""
    if stat.S_ISDIR(found.st_mode):
        return "folder"
    return f"{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}"
