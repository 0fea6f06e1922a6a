"""A loader of pictures that say who they are, and what a consumer sees of it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from loaders import ReuseLoader, Workers
from loaders.order.reuse import MODES
from loaders.pixels.augmentation import Chain, Flip, PadCrop

AUGMENT = Chain([PadCrop(2), Flip()])


def in_threads(*arguments: Any, workers: Any = "auto", **options: Any) -> ReuseLoader:
    """A loader whose data set is read in this process, where the test can watch it."""
    workers = Workers(kind="thread").changed_by(workers)
    return ReuseLoader(*arguments, workers=workers, **options)


class Numbered:
    """Pictures that say who they are: sample i is random pixels seeded by i, and the number i."""

    def __init__(self, size: int) -> None:
        self.size = size
        rng = np.random.default_rng(5)
        self.pixels = torch.from_numpy(rng.integers(1, 256, (size, 3, 4, 5), dtype=np.uint8))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pixels[index], index


class Made:
    """Samples that a function makes from their number."""

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        self.size = size
        self.make = make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@dataclass(frozen=True)
class Served:
    """One batch, told apart by everything that a consumer can see of it."""

    ids: tuple[int, ...]
    serves: tuple[int, ...]
    pixels: bytes


def loader(size: int = 20, **changes: Any) -> ReuseLoader:
    usual = {"batch_size": 4, "reuse": 3, "buffer_batches": 2, "augment": AUGMENT, "workers": 1}
    return in_threads(Numbered(size), **{**usual, **changes})


def watch(loader: ReuseLoader) -> Iterator[Served]:
    for pixels, ids in loader:
        info = loader.last_batch
        assert info is not None
        assert info.ids.tolist() == ids.tolist(), "last_batch tells the batch that was served last"
        yield Served(tuple(ids.tolist()), tuple(info.serves.tolist()), pixels.numpy().tobytes())


def take(loader: ReuseLoader, batches: int) -> list[Served]:
    """So many batches, over as many passes as that takes, leaving the last pass where it stands."""
    passes = (watch(loader) for _ in itertools.count())
    return list(itertools.islice(itertools.chain.from_iterable(passes), batches))


@st.composite
def settings_of_a_loader(draw: st.DrawFn) -> dict[str, Any]:
    batch_size = draw(st.integers(1, 5))
    return {
        "size": draw(st.integers(batch_size, 24)),
        "batch_size": batch_size,
        "reuse": draw(st.integers(1, 4)),
        "buffer_batches": draw(st.integers(1, 4)),
        "mode": draw(st.sampled_from(MODES)),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "reaugment": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }
