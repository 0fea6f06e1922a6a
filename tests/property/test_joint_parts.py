"""What goes with a picture stays with it: masks, boxes and key points after any of our moves.

A picture here says what its parts must be: its mask is a function of its pixels, its boxes surround
what is painted in it, its key points lie on pixels that are told apart.
"""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from loaders import ReuseLoader
from loaders.augment import CentreCrop, Chain, Flip, PadCrop, RandomCrop, RandomResizedCrop
from loaders.pixels.augmentation import Draws, draw_keys
from loaders.pixels.moves import Moves, move_parts
from loaders.pixels.placing import picture_sizes

law = settings(max_examples=examples(100), deadline=None)

EXACT = st.lists(
    st.sampled_from([Flip(), Flip(1.0), PadCrop(2), PadCrop(7), RandomCrop(5), CentreCrop(5)]),
    min_size=1,
    max_size=4,
)
"""Steps that copy pixels and blend none. Every picture here holds a window of 5."""
SIDES = st.integers(5, 12)
COUNT = 5


def draws(seed: int) -> Draws:
    return Draws(draw_keys(seed, 0, np.arange(COUNT), np.zeros(COUNT, np.int64)))


def moved(images: torch.Tensor, steps: list[Any], seed: int) -> tuple[torch.Tensor, Moves]:
    sizes = picture_sizes(images)
    pictures, placings = Chain(steps).apply(images.clone(), draws(seed))
    return pictures, Moves(np.arange(COUNT), sizes, placings)


def random_pictures(rng: np.random.Generator, height: int, width: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, (COUNT, 3, height, width), dtype=np.uint8))


def classes(pictures: torch.Tensor) -> torch.Tensor:
    """A mask that each pixel's own value gives. Black gives 0, as beyond the edge."""
    return pictures[:, 0].to(torch.int64) // 50


def painted(boxes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """White rectangles on black, one a picture."""
    pictures = torch.zeros(len(boxes), 1, height, width, dtype=torch.uint8)
    for picture, (left, top, right, bottom) in zip(pictures, boxes[:, 0].tolist(), strict=True):
        picture[:, top:bottom, left:right] = 255
    return pictures


def surrounding(picture: torch.Tensor) -> list[int]:
    """The box around what is white."""
    rows, columns = picture.amax(-1).nonzero()[:, -1], picture.amax(-2).nonzero()[:, -1]
    if not len(rows):
        return [0, 0, 0, 0]
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


def random_boxes(rng: np.random.Generator, height: int, width: int) -> torch.Tensor:
    xs = np.sort([rng.choice(width + 1, 2, replace=False) for _ in range(COUNT)], axis=1)
    ys = np.sort([rng.choice(height + 1, 2, replace=False) for _ in range(COUNT)], axis=1)
    return torch.from_numpy(np.stack([xs[:, 0], ys[:, 0], xs[:, 1], ys[:, 1]], axis=1))[:, None]


@law
@given(SIDES, SIDES, EXACT, st.integers(0, 2**32 - 1))
def test_a_mask_that_is_a_function_of_the_pixels_still_is(
    height: int, width: int, steps: list[Any], seed: int
) -> None:
    images = random_pictures(np.random.default_rng(seed), height, width)
    pictures, moves = moved(images, steps, seed)
    masks = move_parts("mask", [*classes(images)], moves, "")
    assert torch.equal(torch.stack(masks), classes(pictures))


@law
@given(SIDES, SIDES, EXACT, st.integers(0, 2**32 - 1))
def test_a_box_surrounds_what_is_left_of_what_it_surrounded(
    height: int, width: int, steps: list[Any], seed: int
) -> None:
    boxes = random_boxes(np.random.default_rng(seed), height, width)
    pictures, moves = moved(painted(boxes, height, width), steps, seed)
    found = move_parts("boxes_xyxy", [*boxes], moves, "")
    assert [box.tolist() for box in found] == [[surrounding(one)] for one in pictures]


@law
@given(SIDES, SIDES, EXACT, st.integers(0, 2**32 - 1))
def test_a_key_point_stays_on_its_pixel_and_knows_when_that_is_gone(
    height: int, width: int, steps: list[Any], seed: int
) -> None:
    # Pixels are told apart by their values, of which none is 0.
    numbers = torch.arange(1, height * width + 1, dtype=torch.uint8).reshape(1, 1, height, width)
    where = np.random.default_rng(seed).integers(0, (width, height), (COUNT, 2, 2))
    points = torch.from_numpy(np.concatenate([where, np.full((COUNT, 2, 1), 2)], axis=-1))
    pictures, moves = moved(numbers.expand(COUNT, 1, height, width), steps, seed)
    for n, found in enumerate(move_parts("points", [*points], moves, "")):
        for (x, y, seen), (old_x, old_y, _) in zip(found.tolist(), points[n].tolist(), strict=True):
            value = int(numbers[0, 0, old_y, old_x])
            assert seen == (2 if value in pictures[n].flatten().tolist() else 0)
            assert int(pictures[n, 0, y, x]) == value if seen else (x, y) == (0, 0)


RESIZED = st.tuples(st.integers(4, 24), st.integers(4, 24), st.floats(0.1, 1.0))


@law
@given(st.integers(6, 20), st.integers(6, 20), RESIZED, st.integers(0, 2**32 - 1))
def test_boxes_and_points_agree_with_the_mask_to_half_a_pixel_after_resizing(
    height: int, width: int, out: tuple[int, int, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    boxes = random_boxes(rng, height, width)
    steps = [RandomResizedCrop(out[:2], scale=(out[2], 1.0)), Flip()]
    images = painted(boxes, height, width)
    _, moves = moved(images, steps, seed)
    for mask, box in zip(
        move_parts("mask", [*images[:, 0]], moves, ""),
        move_parts("boxes_xyxy", [*boxes.double()], moves, ""),
        strict=True,
    ):
        left, top, right, bottom = box[0].tolist()
        xs, ys = torch.arange(out[1]) + 0.5, torch.arange(out[0]) + 0.5
        inside = ((ys > top) & (ys < bottom))[:, None] & ((xs > left) & (xs < right))
        on_edge = (((ys - top).abs() < 1e-6) | ((ys - bottom).abs() < 1e-6))[:, None] | (
            ((xs - left).abs() < 1e-6) | ((xs - right).abs() < 1e-6)
        )
        assert torch.equal((mask == 255) & ~on_edge, inside & ~on_edge)
    # A mask that says where each of its pixels comes from.
    sources = torch.stack(
        torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ).expand(COUNT, 2, height, width)
    points = torch.from_numpy(rng.integers(0, (width, height), (COUNT, 3, 2))).double()
    of_pixels = move_parts("mask", [*sources], moves, "")
    for n, found in enumerate(move_parts("points", [*points], moves, "")):
        tall, wide = moves.placings[0].boxes[n, 2:].tolist()
        for (x, y), (old_x, old_y) in zip(found.tolist(), points[n].tolist(), strict=True):
            column, row = round(x), round(y)
            if not (0 <= column < out[1] and 0 <= row < out[0]):
                continue
            from_y, from_x = of_pixels[n][:, row, column].tolist()
            assert abs(from_y - old_y) <= 0.5 * tall / out[0] + 0.5 + 1e-6
            assert abs(from_x - old_x) <= 0.5 * wide / out[1] + 0.5 + 1e-6


@law
@given(SIDES, SIDES, EXACT, st.integers(0, 2**32 - 1), st.integers(0, 2))
def test_a_layout_of_boxes_is_only_another_way_to_write_them(
    height: int, width: int, steps: list[Any], seed: int, layout: int
) -> None:
    boxes = random_boxes(np.random.default_rng(seed), height, width).double()
    _, moves = moved(painted(boxes.long(), height, width), steps, seed)
    first, last = boxes[..., :2], boxes[..., 2:]
    kind, written = (
        ("boxes_xyxy", boxes),
        ("boxes_xywh", torch.cat([first, last - first], -1)),
        ("boxes_cxcywh", torch.cat([(first + last) / 2, last - first], -1)),
    )[layout]
    corners = torch.stack(move_parts("boxes_xyxy", [*boxes], moves, ""))
    found = torch.stack(move_parts(kind, [*written], moves, ""))  # type: ignore[arg-type]
    first, last = corners[..., :2], corners[..., 2:]
    expected = (
        corners,
        torch.cat([first, last - first], -1),
        torch.cat([(first + last) / 2, last - first], -1),
    )[layout]
    assert torch.equal(found, expected)


# ---- the same through a loader ------------------------------------------------------------------


class Painted:
    """Pictures with all their parts. `ragged`: their sizes differ."""

    def __init__(self, seed: int, ragged: bool) -> None:
        rng = np.random.default_rng(seed)
        self.samples: list[dict[str, Any]] = []
        for i in range(10):
            height, width = rng.integers(6, 10, 2).tolist() if ragged else (7, 9)
            pixels = rng.integers(0, 256, (3, height, width), dtype=np.uint8)
            picture = torch.from_numpy(pixels)
            box, second = random_boxes(rng, height, width)[:2, 0].tolist()
            self.samples.append(
                {
                    "picture": picture,
                    "mask": classes(picture[None])[0],
                    "boxes": torch.tensor([box, second]),
                    "points": torch.tensor([[1.0, 2.0], [4.0, 3.0]]),
                    "id": i,
                }
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


PARTS = {"mask": "mask", "boxes": "boxes_xyxy", "points": "points"}


def served(data: Painted, **arguments: Any) -> list[Any]:
    with ReuseLoader(data, 4, reuse=2, parts=PARTS, **arguments) as loader:  # type: ignore[arg-type]
        return list(loader)


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(1, 3), st.integers(1, 4))
def test_single_samples_are_moved_as_those_of_a_batch_are(
    seed: int, ragged: bool, views: int, workers: int
) -> None:
    data = Painted(seed, ragged)
    augment = Chain([RandomResizedCrop((5, 6)), Flip()] if ragged else [PadCrop(2), Flip()])
    each = augment if views == 1 else [augment] * views
    given: dict[str, Any] = {"augment": each, "seed": seed, "workers": workers}
    one_by_one = served(data, collate=torch.utils.data.default_collate, **given)
    for batch, other in zip(served(data, **given), one_by_one, strict=True):
        for name in ("picture", "mask", "boxes", "points"):
            ours, theirs = (b[name] if views > 1 else [b[name]] for b in (batch, other))
            assert len(ours) == len(theirs) == views
            assert all(torch.equal(*both) for both in zip(ours, theirs, strict=True))
        assert torch.equal(batch["id"], other["id"])


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.booleans())
def test_every_view_has_the_parts_of_its_own_draw(seed: int, views: int, reaugment: bool) -> None:
    data, augment = Painted(seed, ragged=False), Chain([PadCrop(3), Flip()])
    given: dict[str, Any] = {"seed": seed, "reaugment": reaugment}
    alone = served(data, augment=augment, **given)
    for batch, only in zip(served(data, augment=[augment] * views, **given), alone, strict=True):
        for picture, mask in zip(batch["picture"], batch["mask"], strict=True):
            assert torch.equal(mask, classes(picture))
        assert torch.equal(batch["picture"][0], only["picture"])
        assert torch.equal(batch["boxes"][0], only["boxes"])
        assert not torch.equal(batch["picture"][0], batch["picture"][1])
