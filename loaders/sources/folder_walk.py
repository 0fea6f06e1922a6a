"""The files of a folder of pictures: their names, which of them are pictures, and what is not read.

Only folders are opened; files are not. Names stay text until a path is needed: a million `Path`s
take longer to make than the walk itself, and 300 bytes each.
"""

import logging
import os
import posixpath
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

log = logging.getLogger(__name__)

LOG_SECONDS = 5.0
"""A walk logs its progress so often."""
PICTURE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jpe", ".jfif", ".ppm",
    ".pgm", ".pbm", ".avif",
)  # fmt: skip
"""Files with these suffixes, also in capitals, are read as pictures."""
SYSTEM_FILES = frozenset({"Thumbs.db", "desktop.ini"})


def is_picture(name: str) -> bool:
    return name.lower().endswith(PICTURE_SUFFIXES) and not is_hidden(name)


def is_hidden(name: str) -> bool:
    """Whether a file is one that systems put beside others, such as .DS_Store and ._a.jpg."""
    base = name.rpartition("/")[2]
    return base.startswith(".") or base in SYSTEM_FILES


def log_unread_files(
    where: Path, others: Sequence[str], unlabelled: Sequence[str] = (), empty: Sequence[str] = ()
) -> None:
    """Log in one line what of `where` is not read: `others` do not end as pictures do, `unlabelled`
    pictures are in no class's folder, and the folders of `empty` classes hold no picture."""
    parts: list[str] = []
    others = [name for name in others if not is_hidden(name)]
    if others:
        suffixes = Counter(posixpath.splitext(name)[1] or "no suffix" for name in others)
        counts = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(5))
        parts.append(
            f"files that do not end as pictures do ({len(others)}: {counts}; the first is"
            f" {others[0]})"
        )
    if unlabelled:
        parts.append(
            f"pictures that lie in no class's folder ({len(unlabelled)}; the first is"
            f" {unlabelled[0]})"
        )
    if empty:
        parts.append(f"the classes without a picture {', '.join(empty[:5])}")
    if parts:
        log.warning("%s: not read are %s", where, "; ".join(parts))


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
    """One walk below `root`. A long one logs its progress."""

    root: Path
    _files: int = 0
    _folders: int = 0
    _logged: float | None = None
    _entered: set[str] = field(default_factory=set[str])

    def files_under(self, folder: str) -> Iterator[str]:
        """All files below a folder, sorted by the parts of their names, also in folders that links
        lead to. A folder that contains the current one is not entered again."""
        self._entered.clear()
        yield from self._walk(folder)

    def _walk(self, folder: str) -> Iterator[str]:
        self._entered.add(os.path.realpath(folder))
        try:
            with os.scandir(folder) as listing:
                entries = {entry.path: _is_folder(entry) for entry in listing}
        except PermissionError as error:
            log.warning("%s: nobody may look into this folder, so it is left out", error.filename)
            return
        # Folders that are entered from here must not keep each other from being entered.
        left_out = {
            path
            for path, is_folder in entries.items()
            if is_folder and os.path.realpath(path) in self._entered
        }
        self._log_progress(len(entries))
        for path in sorted(entries):
            if not entries[path]:
                yield path
            elif path not in left_out:
                yield from self._walk(path)

    def _log_progress(self, entries: int) -> None:
        self._files, self._folders = self._files + entries, self._folders + 1
        now = time.monotonic()
        if self._logged is None:
            self._logged = now
        elif now - self._logged >= LOG_SECONDS:
            self._logged = now
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
