"""Small tars and iterables, whose samples say who they are, and what a loader serves of them."""

import io
import itertools
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from loaders import ReuseLoader
from loaders.pixels.augmentation import Chain, Flip, PadCrop
from loaders.streams import TarShards

AUGMENT = Chain([PadCrop(1), Flip()])
Served = tuple[list[int], list[int], bytes]
"""The numbers of a batch's samples, the numbers of their serves, and their pixels."""


def picture(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(1, 256, (3, 2, 3), dtype=np.uint8)


def write_tar(path: Path, numbers: Sequence[int]) -> None:
    """A shard of these samples, each with the names of two files."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            for suffix, data in ("bin", picture(number).tobytes()), ("cls", b"%d" % number):
                info = tarfile.TarInfo(f"all/{number:05d}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_shards(folder: Path, lengths: Sequence[int]) -> list[str]:
    """Shards with so many samples each, numbered through."""
    paths, begin = list[str](), 0
    for number, length in enumerate(lengths):
        path = folder / f"shard-{number:03d}.tar"
        write_tar(path, range(begin, begin + length))
        paths.append(str(path))
        begin += length
    return paths


def decoded(files: dict[str, Any]) -> tuple[np.ndarray, int]:
    return np.frombuffer(files["bin"], np.uint8).reshape(3, 2, 3).copy(), int(files["cls"])


class Counted(IterableDataset[Any]):
    """An iterable without a state. `read` counts what was asked of it."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.read = 0
        self.pass_index = 0

    def set_epoch(self, epoch: int) -> None:
        self.pass_index = epoch

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        for number in range(self.samples):
            self.read += 1
            yield self.sample((number + 7 * self.pass_index) % self.samples)

    def sample(self, number: int) -> tuple[np.ndarray, int]:
        return picture(number), number


class Stateful(Counted):
    """An iterable that can go on where a state says."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.at = self.begin = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        begin, self.begin = self.begin, 0
        for number in range(begin, self.samples):
            self.read += 1
            self.at = number + 1
            yield self.sample((number + 7 * self.pass_index) % self.samples)


def watch(loader: ReuseLoader) -> Iterator[Served]:
    for pixels, numbers in loader:
        assert loader.last_batch is not None
        yield numbers.tolist(), loader.last_batch.serves.tolist(), pixels.numpy().tobytes()


def take(loader: ReuseLoader, batches: int) -> list[Served]:
    """So many batches, over as many passes as that takes, leaving the last pass where it stands."""
    passes = (watch(loader) for _ in itertools.count())
    return list(itertools.islice(itertools.chain.from_iterable(passes), batches))


def shards(
    folder: Path,
    lengths: tuple[int, ...] = (6, 3, 8, 5),
    samples: int | None = None,
    **options: Any,
) -> ReuseLoader:
    if not list(folder.glob("*.tar")):
        write_shards(folder, lengths)
    usual = {"batch_size": 4, "reuse": 2, "buffer_batches": 2, "workers": 2, "augment": AUGMENT}
    stream = TarShards(str(folder / "shard-*.tar"), decoded, samples=samples)
    return ReuseLoader(stream, **{**usual, **options})


def numbers(loader: ReuseLoader) -> list[int]:
    return [number for served, *_ in watch(loader) for number in served]


def jpeg_tar(path: Path, labels: dict[str, str], size: int = 16, only: str = "") -> None:
    with tarfile.open(path, "w") as tar:
        for name, label in labels.items():
            rows = torch.full((size, size, 3), 40 * int(name[-1]), dtype=torch.uint8).numpy()
            file = io.BytesIO()
            Image.fromarray(rows).save(file, "JPEG")
            for suffix, data in ("jpg", file.getvalue()), ("cls", label.encode()):
                if suffix != only:
                    info = tarfile.TarInfo(f"{name}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
