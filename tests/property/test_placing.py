"""The torch version of what pictures show, made for GPUs, gives the bits of the kernels."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from loaders.pixels.augmentation import (
    CentreCrop,
    Chain,
    Cutout,
    Draws,
    Flip,
    PadCrop,
    RandomResizedCrop,
)
from loaders.pixels.moving import moved
from loaders.pixels.placing import Placing, _batch_in_place, _by_kernel

sides = st.integers(1, 70)


@given(sides, sides, sides, sides, st.integers(0, 2**32 - 1), st.integers(0, 3), st.booleans())
def test_uint8_pictures_come_out_bit_for_bit_the_same(
    height: int, width: int, tall: int, wide: int, seed: int, kind: int, channels_last: bool
) -> None:
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(0, 256, (3, 3, height, width), dtype=np.uint8))
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    draws = Draws(rng.integers(0, 2**63, 3, dtype=np.uint64))
    first = (
        RandomResizedCrop((tall, wide)),
        RandomResizedCrop((tall, wide), scale=(0.9, 1.0)),
        PadCrop(min(tall, 9)),
        CentreCrop((min(tall, height), min(wide, width))),
    )[kind]
    placing = Placing.whole(images)
    for step in (first, Flip(), Cutout(5)):
        placing = step.place(placing, draws)
    by_torch = moved(
        images.movedim(-3, -1), placing.boxes, placing.size, placing.resized, placing.flips,
        placing.holes,
    )  # fmt: skip
    by_kernel = _by_kernel(_batch_in_place(images), placing)
    assert torch.equal(by_torch.movedim(-1, -3), by_kernel)


@given(sides, sides, sides, st.integers(0, 2**32 - 1))
def test_floats_are_what_the_bytes_are_within_their_rounding(
    height: int, width: int, side: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(0, 256, (2, 3, height, width), dtype=np.uint8))
    keys = rng.integers(0, 2**63, 2, dtype=np.uint64)
    crop = Chain([RandomResizedCrop(side), Flip()])
    exact, rounded = crop(images.double(), Draws(keys)), crop(images, Draws(keys))
    # Means of neighbours, rows and columns are rounded in turn, along both axes.
    assert (exact - rounded.double()).abs().max() <= 2.5
