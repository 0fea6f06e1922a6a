"""Where random resized crops lie, against torchvision's own drawing of them."""

import math

import numpy as np
import pytest
import torch
from torchvision import transforms

from loaders.pixels.augmentation import Draws, RandomResizedCrop, draw_keys
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


def one_by_hand(draws: Draws, height: int, width: int) -> tuple[int, int, int, int]:
    """torchvision's lines, with our numbers for the first (only) sample."""
    kept = None
    areas = [height * width * draws.uniform(0.08, 1.0)[0] for _ in range(10)]
    ratios = [math.exp(draws.uniform(math.log(3 / 4), math.log(4 / 3))[0]) for _ in range(10)]
    for area, ratio in zip(areas, ratios, strict=True):
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height and kept is None:
            kept = h, w
    down, right = draws.uniform()[0], draws.uniform()[0]
    if kept is not None:
        h, w = kept
        return math.floor(down * (height - h + 1)), math.floor(right * (width - w + 1)), h, w
    h = round(width / (3 / 4)) if width / height < 3 / 4 else height
    w = round(height * 4 / 3) if width / height > 4 / 3 else width
    return (height - h) // 2, (width - w) // 2, h, w


def test_a_box_is_a_function_of_its_samples_numbers_and_of_its_pictures_size() -> None:
    rng = np.random.default_rng(1)
    heights, widths = rng.integers(4, 80, 200), rng.integers(4, 80, 200)
    together = boxes(many(list(range(200))), heights, widths)
    for n in range(200):
        alone = one_by_hand(many([n]), int(heights[n]), int(widths[n]))
        assert tuple(together[n].tolist()) == alone


def test_whoever_fits_at_once_draws_as_many_numbers_as_who_never_does() -> None:
    draws = [many([3, 4, 5]) for _ in range(2)]
    boxes(draws[0], 50, 50)
    boxes(draws[1], 2, 90)
    assert np.array_equal(draws[0].uniform(), draws[1].uniform())
