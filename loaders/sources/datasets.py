"""Data sets of pictures.

Data sets here are map-style: `len()` and `[i] -> (picture, label)`, where a picture is uint8 [3, H,
W]. They decode and do nothing random: randomness belongs in `augment`, which runs at every serve.
"""

import contextlib
import logging
import os
import posixpath
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from loaders.errors import SourceError
from loaders.pixels.decoding import PictureDecoder
from loaders.pixels.jpegs import ANYWHERE, DecodeCounts, Room

CIFAR10_FOLDER = "cifar-10-batches-py"


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


@dataclass(frozen=True, slots=True)
class PictureArrays:
    """Pictures that are decoded already: uint8 [N, H, W, 3] in memory."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.pixels[index]).permute(2, 0, 1), int(self.labels[index])


@dataclass(frozen=True, slots=True)
class PictureFiles:
    """Pictures in files, decoded when asked for."""

    paths: Sequence[Path | str]
    labels: Sequence[int]
    classes: tuple[str, ...]
    decoder: PictureDecoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.read_into(index)

    def read_into(self, index: int, room: Room = ANYWHERE) -> tuple[torch.Tensor, int]:
        """Sample `index`, with its pixels in the memory of `room` where that saves a copy."""
        return self.decoder(self.paths[index], room), self.labels[index]

    def name_of(self, index: int) -> str:
        """The name of sample `index` in errors."""
        return str(self.paths[index])

    def read(self, index: int) -> bytes:
        """The file of sample `index`."""
        return Path(self.paths[index]).read_bytes()


def unwrapped(dataset: Any) -> tuple[Any, NDArray[np.int64] | None]:
    """The data set that torch's `Subset`s are subsets of, and their rows in it (None: all rows)."""
    rows: NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices, dtype=np.int64)
        rows = indices if rows is None else indices[rows]
        dataset = dataset.dataset
    return dataset, rows


def counts_of(dataset: Any) -> list[DecodeCounts]:
    """The counts of all sources that a data set reads pictures from."""
    base = unwrapped(dataset)[0]
    if type(base) is ConcatDataset:
        return [counts for part in base.datasets for counts in counts_of(part)]
    counts = getattr(base, "counts", getattr(getattr(base, "decoder", None), "counts", None))
    return [counts] if isinstance(counts, DecodeCounts) else []


def picture_folder(
    root: Path,
    size: int | None = None,
    square: bool = True,
    *,
    exif: bool = True,
    pixel_limit: int | None = None,
) -> PictureFiles:
    """The pictures `root/CLASS/*.jpg`, with classes in alphabetical order. `size` and `square` say
    what is stored of a picture, `exif` whether it is turned upright, `pixel_limit` how large it may
    be (see `decoding`). Files that are not read are logged in one line."""
    decoder = PictureDecoder(size, square, exif, pixel_limit)
    if not root.is_dir():
        raise SourceError(
            f"there is no folder {root}: give the folder that holds one folder for each class"
        )
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    walk = FolderWalk(root)
    names: list[str] = []
    labels: list[int] = []
    others: list[str] = []
    empty: list[str] = []
    for label, name in enumerate(classes):
        before = len(names)
        for file in walk.files_under(str(root / name)):
            (names if is_picture(file) else others).append(file)
        labels += [label] * (len(names) - before)
        empty += [name] if len(names) == before else []
    if not names:
        raise SourceError(
            f"there are no pictures under {root}: put them into CLASS/NAME"
            f"{'|'.join(PICTURE_SUFFIXES)}"
        )
    if len(set(labels)) == 1:
        raise SourceError(
            f"there is only one class under {root} ('{classes[labels[0]]}'): give at least two"
            " folders with pictures"
        )
    beside = sorted(str(p) for p in root.iterdir() if is_picture(p.name) and p.is_file())
    log_unread_files(root, others, beside, empty)
    return PictureFiles(names, labels, tuple(classes), decoder)


def cifar10(root: Path, train: bool) -> PictureArrays:
    """CIFAR-10 from `root`. It is downloaded there if it is absent and the network allows it."""
    from torchvision.datasets import CIFAR10  # slow to import, and only needed here

    present, root_was_there = (root / CIFAR10_FOLDER).is_dir(), root.exists()
    try:
        data = CIFAR10(str(root), train=train, download=not present)
    except (OSError, RuntimeError, EOFError) as error:
        if not root_was_there:
            with contextlib.suppress(OSError):  # torchvision makes the folder before it downloads
                root.rmdir()
        what = "is damaged" if present else "does not exist and could not be downloaded"
        raise SourceError(
            f"CIFAR-10 {what}: {root / CIFAR10_FOLDER}: {error}; put the folder '{CIFAR10_FOLDER}'"
            f" of its python version under {root}"
        ) from error
    # torchvision gives rows of pixels as a view of planes.
    pixels = np.ascontiguousarray(data.data)
    return PictureArrays(pixels, np.asarray(data.targets), tuple(data.classes))
