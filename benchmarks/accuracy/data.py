"""All pictures of a task as uint8 tensors.

    CIFAR-10's training set   train | hold-out: curves, plateau rule | selection: between variants
    CIFAR-10's test set       looked at once, when a run is over

The parts of the training set are disjoint and class-balanced, and the same for every seed of a run.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

CLASSES = 10
SUBSET_SEED = 20231
FOLDER = "cifar-10-batches-py"


@dataclass(frozen=True, slots=True)
class Part:
    """Pictures uint8 [N, 3, H, W] and their classes."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Pictures:
    train: Part
    holdout: Part
    selection: Part
    test: Part
    mean: torch.Tensor
    """Of the train part, per channel, in units of 0 to 255."""
    std: torch.Tensor

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        images = (pixels.float() - self.mean) / self.std
        return images.contiguous(memory_format=torch.channels_last)


Raw = tuple[NDArray[np.uint8], NDArray[np.int64]]


def load_cifar(root: Path, sizes: tuple[int, int, int]) -> Pictures:
    """Pictures of CIFAR-10's training set, as many as `Task.sizes` says, and its whole test set."""
    folder = root / FOLDER
    if not folder.is_dir():
        raise SystemExit(f"--data: no folder {folder}; unpack CIFAR-10 (python version) there")
    batches = [_read(folder / f"data_batch_{number}") for number in range(1, 6)]
    pixels = np.concatenate([batch[0] for batch in batches])
    labels = np.concatenate([batch[1] for batch in batches])
    return _split((pixels, labels), _read(folder / "test_batch"), sizes)


def _read(path: Path) -> Raw:
    with path.open("rb") as file:
        batch = pickle.load(file, encoding="bytes")
    pixels = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
    return pixels, np.asarray(batch[b"labels"], dtype=np.int64)


def _split(raw: Raw, test: Raw, sizes: Sequence[int]) -> Pictures:
    train, holdout, selection = _balanced(raw[1], sizes)
    pixels = raw[0][train].astype(np.float64)
    mean, std = pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3))

    def part(source: Raw, ids: NDArray[np.int64]) -> Part:
        return Part(*(torch.from_numpy(array[ids]) for array in source))

    def channels(values: NDArray[np.float64]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1)

    return Pictures(
        train=part(raw, train),
        holdout=part(raw, holdout),
        selection=part(raw, selection),
        test=part(test, np.arange(len(test[1]))),
        mean=channels(mean),
        std=channels(std),
    )


def _balanced(labels: NDArray[np.int64], sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    """Disjoint index sets of the given sizes, each class equally often in each."""
    rng = np.random.default_rng(SUBSET_SEED)
    by_class = [rng.permutation(np.flatnonzero(labels == label)) for label in range(CLASSES)]
    begin, parts = 0, []
    for size in sizes:
        if size % CLASSES:
            raise ValueError(f"a balanced part holds a multiple of {CLASSES} pictures, not {size}")
        end = begin + size // CLASSES
        if end > min(map(len, by_class)):
            raise ValueError(f"not enough pictures a class for parts of {tuple(sizes)}")
        parts.append(np.sort(np.concatenate([ids[begin:end] for ids in by_class])))
        begin = end
    return parts
