"""Data sets of pictures, and the order in which a pass asks for their samples.

The order of a pass is f(seed, pass, rank, world): every rank makes the same permutation and takes
every world-th id of it. So ranks share no samples, and a saved run needs no list of ids to go on.

Data sets here are map-style: `len()` and `[i] -> (picture, label)`, where a picture is uint8 [3, H,
W]. They decode and do nothing random: randomness belongs to `augment`, which runs at every serve.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from loaders.errors import SourceError
from loaders.pixels.decoding import PictureDecoder, Room
from loaders.sources.left_out import PICTURE_SUFFIXES, is_picture, tell_left_out

CIFAR10_FOLDER = "cifar-10-batches-py"


def pass_order(
    samples: int,
    *,
    seed: int,
    pass_index: int,
    shuffle: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> NDArray[np.int64]:
    """The ids that `rank` serves in pass `pass_index`. Every rank serves the same number of them,
    for which the first few ids may be served twice."""
    order = np.arange(samples)
    if shuffle:
        order = np.random.default_rng(np.random.SeedSequence((seed, pass_index))).permutation(order)
    return shared_out(order, rank, world_size)


def shared_out(order: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.int64]:
    """The share of `rank`: every `world_size`-th id of the order."""
    whole = np.resize(order, samples_per_rank(len(order), world_size) * world_size)
    return whole[rank::world_size].copy()


def samples_per_rank(samples: int, world_size: int) -> int:
    return -(-samples // world_size)


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

    paths: Sequence[Path]
    labels: Sequence[int]
    classes: tuple[str, ...]
    decoder: PictureDecoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.decoder(self.paths[index]), self.labels[index]

    def read_into(self, index: int, room: Room) -> tuple[torch.Tensor, int]:
        """Sample `index`, with its pixels in the memory that `room` gives where that saves a
        copy."""
        return self.decoder(self.paths[index], room), self.labels[index]


def unwrapped(dataset: Any) -> tuple[Any, NDArray[np.int64] | None]:
    """The data set that torch's `Subset`s are subsets of, and their rows in it (None: all rows)."""
    rows: NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices, dtype=np.int64)
        rows = indices if rows is None else indices[rows]
        dataset = dataset.dataset
    return dataset, rows


def picture_folder(root: Path, size: int | None = None, square: bool = True) -> PictureFiles:
    """The pictures `root/CLASS/*.jpg`, with classes in alphabetical order, as in torchvision's
    ImageFolder. `size` and `square` say what is stored of a picture (see `decoding`). What lies
    there and is not read is said in one line."""
    if not root.is_dir():
        raise SourceError(
            f"there is no folder {root}: give the folder that holds one folder for each class"
        )
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    paths: list[Path] = []
    labels: list[int] = []
    others: list[str] = []
    empty: list[str] = []
    for label, name in enumerate(classes):
        files = _files_below(root / name)
        found = sorted(path for path in files if is_picture(path.name))
        paths += found
        labels += [label] * len(found)
        others += sorted(str(path) for path in files if not is_picture(path.name))
        empty += [] if found else [name]
    if not paths:
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
    tell_left_out(root, others, beside, empty)
    return PictureFiles(paths, labels, tuple(classes), PictureDecoder(size, square))


def _files_below(folder: Path) -> list[Path]:
    """All files, also those in folders that links lead to."""
    found: list[Path] = []
    entered: set[str] = set()
    for above, folders, files in os.walk(folder, followlinks=True):
        entered.add(os.path.realpath(above))
        folders[:] = [f for f in folders if os.path.realpath(os.path.join(above, f)) not in entered]
        found += [Path(above, file) for file in files]
    return found


def cifar10(root: Path, train: bool) -> PictureArrays:
    """CIFAR-10 from `root`. It is downloaded there if it is absent and the network allows it."""
    from torchvision.datasets import (
        CIFAR10,
    )  # it is slow to import, and only this function needs it

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
