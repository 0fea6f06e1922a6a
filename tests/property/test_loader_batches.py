"""What a batch looks like: as a DataLoader's, for every kind of sample, and the consumer's own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from support.numbered_samples import Made, in_threads
from torch.utils.data import DataLoader

from loaders.pixels.augmentation import Draws


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def picture(i: int) -> Image.Image:
    return Image.fromarray(np.full((3, 5, 3), i, dtype=np.uint8))


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "array": lambda i: np.full((3, 2), i, dtype=np.int16),
    "tuple": lambda i: (torch.full((2,), i, dtype=torch.int32), i),
    "list": lambda i: [torch.tensor(float(i)), i],
    "dict": lambda i: {"picture": torch.full((1, 2), i, dtype=torch.uint8), "label": i},
    "nested": lambda i: {"a": (torch.tensor(i), [i, float(i)]), "b": {"c": f"sample {i}"}},
    "namedtuple": lambda i: Pair(torch.full((2,), i), i),
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "str": lambda i: f"sample {i}",
    "bytes": lambda i: bytes([i]),
    "float16": lambda i: torch.tensor([i], dtype=torch.float16),
    "numpy scalar": lambda i: np.float32(i / 3),
    "numpy int": lambda i: np.int16(i),
    "numpy str": lambda i: np.str_(f"sample {i}"),
    "non-contiguous": lambda i: torch.arange(6).reshape(2, 3).t() + i,
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_batch_without_reuse_is_what_a_dataloader_collates(kind: str) -> None:
    data = Made(7, SAMPLES[kind])
    ours = list(in_threads(data, batch_size=3, reuse=1, shuffle=False, workers=2))
    theirs = list(DataLoader(data, batch_size=3))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    else:
        assert ours == theirs


def test_keys_in_another_order_do_not_swap_the_parts_of_a_sample() -> None:
    def make(i: int) -> dict[str, int]:
        return {"a": i, "b": -i} if i % 2 else {"b": -i, "a": i}

    [ours] = in_threads(Made(6, make), batch_size=6, reuse=1, shuffle=False, workers=1)
    [theirs] = DataLoader(Made(6, make), batch_size=6)
    assert ours["a"].tolist() == theirs["a"].tolist()
    assert ours["b"].tolist() == theirs["b"].tolist()


def test_pictures_of_pillow_become_uint8_with_channels_first() -> None:
    data = Made(4, lambda i: (picture(i), picture(i).convert("L")))
    [(colour, grey)] = in_threads(data, batch_size=4, reuse=1, shuffle=False, workers=1)
    assert colour.dtype == grey.dtype == torch.uint8
    assert colour.shape == (4, 3, 3, 5)
    assert grey.shape == (4, 1, 3, 5)
    assert colour[:, 0, 0, 0].tolist() == [0, 1, 2, 3]


def test_the_augmentation_gets_the_picture_wherever_it_stands_in_a_sample() -> None:
    data = Made(6, lambda i: {"label": i, "x": torch.full((3, 2, 2), i, dtype=torch.uint8)})

    def add_hundred(images: torch.Tensor, draws: Draws) -> torch.Tensor:
        return images + 100

    [batch] = in_threads(data, 6, 1, augment=add_hundred, shuffle=False, workers=1)
    assert batch["x"][:, 0, 0, 0].tolist() == [100 + i for i in range(6)]
    assert batch["label"].tolist() == list(range(6))
