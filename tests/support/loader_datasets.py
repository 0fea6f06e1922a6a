"""Data sets for the tests of `ReuseLoader`'s options: a worker process has to import them."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

SIZE = 8


def pixels(index: int) -> torch.Tensor:
    """Of picture `index`: random, and its own."""
    rng = np.random.default_rng(index)
    return torch.from_numpy(rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).permute(2, 0, 1)


class Pictures:
    """Sample i is (its pixels, i); `bad` ones cannot be read; a file counts what was read."""

    def __init__(self, size: int, bad: tuple[int, ...] = (), count: Path | None = None) -> None:
        self.size, self.bad = size, frozenset(bad)
        # As bytes, because a file whose name a data set holds is a part of it: a cache would be
        # another one whenever that file changed.
        self.count = None if count is None else os.fsencode(count)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.count is not None:
            with open(self.count, "ab", buffering=0) as file:
                file.write(b"x")
        if index in self.bad:
            raise OSError(f"sector {index}")
        return pixels(index), index


class Killed(Pictures):
    """Reading sample `deadly` kills the process with SIGKILL, the first `times` times."""

    def __init__(self, size: int, deadly: int, times: int, killed: Path) -> None:
        super().__init__(size)
        self.deadly, self.times, self.killed = deadly, times, killed

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.deadly:
            before = self.killed.stat().st_size if self.killed.exists() else 0
            if before < self.times:
                self.killed.write_text("x" * (before + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Hanging(Pictures):
    """Reading one of the samples `hangs` never ends."""

    def __init__(self, size: int, hangs: tuple[int, ...]) -> None:
        super().__init__(size)
        self.hangs = frozenset(hangs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.hangs:
            threading.Event().wait()
        return super().__getitem__(index)


class ToldByInit(Pictures):
    """Sample i is (its pixels, what `tell_data_set` has set, torch's number of this worker)."""

    told = -1

    def __getitem__(self, index: int) -> Any:
        info = torch.utils.data.get_worker_info()
        return pixels(index), index, self.told, -1 if info is None else info.id


def tell_data_set(number: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    assert info is not None and info.id == number and info.seed == torch.initial_seed()
    info.dataset.told = 10 * info.num_workers + number


def reseed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def fail_to_begin(number: int) -> None:
    raise RuntimeError(f"no licence for worker {number}")


def never_again(image: torch.Tensor) -> torch.Tensor:
    """An augmentation that hangs at a picture whose first byte is odd."""
    if int(image[0, 0, 0]) % 2:
        threading.Event().wait()
    return image


class Files:
    """Pictures in files, as a user reads them with Pillow: no `read_into`, no errors of ours."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as picture:
            return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1), index


class Sized(Pictures):
    """Pictures of many sizes."""

    def __init__(self, size: int, spread: float, seed: int) -> None:
        super().__init__(size)
        self.sides = (16 * np.random.default_rng(seed).lognormal(0, spread, size)).astype(int) + 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        side = int(self.sides[index])
        return torch.full((3, side, side), index % 251, dtype=torch.uint8), index


def served(loader: Any, batches: int | None = None) -> list[tuple[tuple[int, ...], bytes]]:
    """Labels and pixels of a pass, or of its first `batches` batches."""
    taken = []
    for pictures, labels in loader:
        taken.append((tuple(labels.tolist()), pictures.numpy().tobytes()))
        if len(taken) == batches:
            break
    return taken


class Drawing(Pictures):
    """Reading draws random numbers, from everything there is."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.own = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        drawn = [float(torch.rand(())), np.random.rand(), random.random(), self.own.random()]
        return torch.tensor(drawn, dtype=torch.float64), index


class SharedFile(Pictures):
    """All samples come out of one file, which is opened once: seek, then read."""

    def __init__(self, size: int, path: Path) -> None:
        super().__init__(size)
        self.path = path
        self.file: Any = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(index)
        time.sleep(0.0001)
        return torch.tensor(list(self.file.read(1))), index


class Broken(Pictures):
    """Sample i is (its pixels, i), or None for those that are `broken`."""

    def __init__(self, size: int, broken: tuple[int, ...], count: Path | None = None) -> None:
        super().__init__(size, count=count)
        self.broken = frozenset(broken)

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return None if index in self.broken else sample


class Optional(Pictures):
    """Sample i is a dict; one with an odd number lacks the mask, every third one has a caption and
    an array beside it, and every fifth one lacks the picture."""

    def __getitem__(self, index: int) -> Any:
        sample: dict[str, Any] = {"picture": pixels(index), "number": index}
        if index % 2 == 0:
            sample["mask"] = pixels(index)[:1].clone()
        if index % 3 == 0:
            sample["caption"] = f"picture {index}"
            sample["vector"] = np.full(index, index, dtype=np.int16)
        if index % 5 == 4:
            del sample["picture"]
            sample.pop("mask", None)
        return sample


def whole(samples: list[Any]) -> Any:
    """The usual collate function for samples of which some are None."""
    return torch.utils.data.default_collate([s for s in samples if s is not None])


def as_they_are(samples: list[Any]) -> Any:
    return samples


def darker(image: torch.Tensor) -> torch.Tensor:
    return image // 2


def named(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "named": sorted(sample)}


def in_memory(kind: type, targets: Any, transform: Any = None) -> Any:
    """CIFAR or MNIST of torchvision, without its files."""
    made: Any = object.__new__(kind)
    grey = "MNIST" in kind.__name__
    shape = (len(targets), *((28, 28) if grey else (32, 32, 3)))
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    made.data = torch.from_numpy(pixels) if grey else pixels
    made.targets, made.transform = targets, transform
    made.target_transform = made.transforms = None
    return made
