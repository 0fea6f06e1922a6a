"""Where crops lie, against torchvision, and that torch and the kernels cut the same bits there."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision import transforms

from loaders.pixels.augmentation import (
    CentreCrop,
    Chain,
    Cutout,
    Draws,
    Flip,
    PadCrop,
    RandomResizedCrop,
    draw_keys,
)
from loaders.pixels.moving import moved
from loaders.pixels.placing import Placing

SETTINGS = [
    (40, 60, (0.08, 1.0), (3 / 4, 4 / 3)),
    (224, 224, (0.08, 1.0), (3 / 4, 4 / 3)),
    (20, 90, (0.3, 1.0), (3 / 4, 4 / 3)),  # half of the tries do not fit
    (33, 32, (0.5, 0.9), (0.5, 3.0)),
    (8, 100, (0.9, 1.0), (3 / 4, 4 / 3)),  # none ever fits
    (100, 8, (0.9, 1.0), (3 / 4, 4 / 3)),
    (10, 10, (1.0, 1.0), (1.0, 1.0)),
    (50, 49, (1.1, 1.2), (0.9, 1.2)),  # larger than the picture: all of it
]


def many(ids: list[int]) -> Draws:
    return Draws(draw_keys(0, 0, np.array(ids), np.zeros(len(ids), np.int64)))


def boxes(
    draws: Draws,
    height: int | np.ndarray,
    width: int | np.ndarray,
    **law: tuple[float, float],
) -> np.ndarray:
    """Top, left, height, width; of pictures of one size or of one each."""
    count = len(draws.keys)
    whole = np.zeros((count, 4), np.int32)
    whole[:, 2], whole[:, 3] = height, width
    placing = Placing(whole, (1, 1), False, np.zeros(count, bool), None, 0)
    return RandomResizedCrop(8, **law).place(placing, draws).boxes


@pytest.mark.parametrize(("height", "width", "scale", "ratio"), SETTINGS)
def test_boxes_are_distributed_as_torchvisions(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> None:
    count = 4000
    ours = boxes(many(list(range(count))), height, width, scale=scale, ratio=ratio)
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = np.array(
        [
            transforms.RandomResizedCrop.get_params(image, list(scale), list(ratio))
            for _ in range(count)
        ]
    )
    area = [b[:, 2] * b[:, 3] for b in (ours, theirs)]
    right = [b[:, 1] + b[:, 3] for b in (ours, theirs)]
    pairs = [*zip(ours.T, theirs.T, strict=True), tuple(area), tuple(right)]
    for mine, his in pairs:
        # Two samples of 4000 from one law differ by less in their cumulated frequencies, but for
        # one time in 20 000 (Kolmogorov, Smirnov).
        assert largest_gap(mine, his) < 0.052
    assert (ours[:, 0] + ours[:, 2]).max() <= height
    assert (ours[:, 1] + ours[:, 3]).max() <= width
    assert ours[:, :2].min() >= 0
    assert ours[:, 2:].min() >= 1


def largest_gap(mine: np.ndarray, his: np.ndarray) -> float:
    values = np.union1d(mine, his)
    at = [np.searchsorted(np.sort(sample), values, side="right") for sample in (mine, his)]
    return float(abs(at[0] / len(mine) - at[1] / len(his)).max())


def test_whoever_fits_at_once_draws_as_many_numbers_as_who_never_does() -> None:
    draws = [many([3, 4, 5]) for _ in range(2)]
    boxes(draws[0], 50, 50)
    boxes(draws[1], 2, 90)
    assert np.array_equal(draws[0].uniform(), draws[1].uniform())


sides = st.integers(1, 70)


@given(sides, sides, sides, sides, st.integers(0, 2**32 - 1), st.integers(0, 3), st.booleans())
def test_uint8_pictures_come_out_bit_for_bit_the_same(
    height: int, width: int, tall: int, wide: int, seed: int, kind: int, channels_last: bool
) -> None:
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(0, 256, (3, 3, height, width), dtype=np.uint8))
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    keys = rng.integers(0, 2**63, 3, dtype=np.uint64)
    draws, again = Draws(keys), Draws(keys)
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
    by_kernel = Chain((first, Flip(), Cutout(5)))(images, again)
    assert torch.equal(by_torch.movedim(-1, -3), by_kernel)
