"""Augmentations against slow references that treat one picture at a time, in plain Python.

A reference gets the numbers that were drawn for its picture and does with them what the class says;
the numbers themselves are tested apart.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from support.products import examples
from torchvision.transforms import v2

from loaders import ReuseLoader
from loaders.batching.batches import BatchMaker
from loaders.blocks import Blocks
from loaders.errors import SampleShapeError
from loaders.pixels.augmentation import (
    CentreCrop,
    Chain,
    Cutout,
    Draws,
    Flip,
    PadCrop,
    RandomCrop,
    RandomResizedCrop,
    draw_keys,
)
from loaders.pixels.placing import Placing
from loaders.slots.slab import Slab
from loaders.stats import BatchInfo

law = settings(max_examples=examples(50), deadline=None)


def run_augmentation(augment: Any, images: torch.Tensor, draws: Draws) -> torch.Tensor:
    """A batch as the loader makes it."""
    slab = Slab(images[0], len(images))
    for slot, image in enumerate(images):
        slab.write(slot, image, slot)
    maker = BatchMaker(slab, augment, None, lambda info: draws.keys, Blocks(spare=1))
    nobody = np.zeros(len(images), np.int64)
    info = BatchInfo(0, 0, nobody, nobody, nobody, nobody)
    return maker.finish(maker.make(info, np.arange(len(images)), info.serves))


def keys(ids: list[int], serves: list[int], seed: int = 0, pass_index: int = 0) -> NDArray[Any]:
    return draw_keys(seed, pass_index, np.array(ids, np.int64), np.array(serves, np.int64))


def many(count: int = 4000, **of: int) -> Draws:
    return Draws(keys(list(range(count)), [0] * count, **of))


def pictures(count: int = 12, height: int = 7, width: int = 9) -> torch.Tensor:
    rng = np.random.default_rng(3)
    return torch.from_numpy(rng.integers(1, 256, (count, 3, height, width), dtype=np.uint8))


def apply(augment: Any, images: torch.Tensor, draws: Draws) -> torch.Tensor:
    """An augmentation may write into the batch that it is given: give it a copy."""
    return augment(images.clone(memory_format=torch.preserve_format), draws)


# ---- the draws ----------------------------------------------------------------------------------


@law
@given(
    seed=st.integers(0, 2**63),
    pass_index=st.integers(0, 10**6),
    ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=20),
    data=st.data(),
)
def test_a_draw_is_a_function_of_seed_pass_sample_and_serve_whoever_else_is_in_the_batch(
    seed: int, pass_index: int, ids: list[int], data: st.DataObject
) -> None:
    serves = [data.draw(st.integers(0, 9)) for _ in ids]
    together = Draws(keys(ids, serves, seed, pass_index))
    batch = [together.uniform(), together.uniform(-2, 5), together.integers(0, 7)]
    for place, (sample, serve) in enumerate(zip(ids, serves, strict=True)):
        alone = Draws(keys([sample], [serve], seed, pass_index))
        single = [alone.uniform(), alone.uniform(-2, 5), alone.integers(0, 7)]
        assert [values[place] for values in batch] == [value[0] for value in single]


def test_numbers_that_are_drawn_at_once_are_those_that_are_drawn_one_by_one() -> None:
    draws, again = many(5), many(5)
    drawn = [*draws.many(3), draws.uniform(), *draws.many(2)]
    assert np.array_equal(drawn, [again.uniform() for _ in range(6)])


def test_no_two_samples_passes_or_serves_share_a_key() -> None:
    found = np.concatenate(
        [
            draw_keys(seed, pass_index, np.arange(200), np.full(200, serve))
            for seed in range(5)
            for pass_index in range(5)
            for serve in range(8)
        ]
    )
    assert len(np.unique(found)) == len(found) == 40_000


@pytest.mark.parametrize("vary", ["sample", "serve", "pass", "seed", "draw"])
def test_draws_are_roughly_uniform_and_independent_of_their_neighbours(vary: str) -> None:
    n = 4000
    along: dict[str, Callable[[], NDArray[Any]]] = {
        "sample": lambda: many(n).uniform(),
        "serve": lambda: Draws(keys([7] * n, list(range(n)))).uniform(),
        "pass": lambda: np.concatenate(
            [Draws(keys([7], [0], pass_index=p)).uniform() for p in range(n)]
        ),
        "seed": lambda: np.concatenate([Draws(keys([7], [0], seed=s)).uniform() for s in range(n)]),
        "draw": lambda: np.concatenate([d.uniform() for d in [Draws(keys([7], [0]))] * n]),
    }
    values = along[vary]()
    assert values.min() >= 0
    assert values.max() < 1
    # Standard errors: 0.0046 of the mean, 0.016 of a correlation, sqrt(90 / 100) of a bin's count.
    assert abs(values.mean() - 0.5) < 0.025
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.08
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert abs(counts - n / 10).max() < 100


def test_integers_take_every_value_from_low_to_high_minus_one() -> None:
    values = many().integers(-2, 3)
    assert values.dtype == np.int64
    assert sorted(set(values.tolist())) == [-2, -1, 0, 1, 2]
    assert np.bincount(values + 2).min() > 700  # of 800


def test_uniform_stays_within_its_bounds() -> None:
    values = many().uniform(3, 8)
    assert values.min() >= 3
    assert values.max() < 8
    assert values.mean() == pytest.approx(5.5, abs=0.15)


# ---- against references -------------------------------------------------------------------------


def pad_crop_one(image: NDArray[Any], padding: int, top: int, left: int) -> NDArray[Any]:
    channels, height, width = image.shape
    out = np.zeros_like(image)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                from_y, from_x = y + top - padding, x + left - padding
                if 0 <= from_y < height and 0 <= from_x < width:
                    out[c, y, x] = image[c, from_y, from_x]
    return out


def cutout_one(image: NDArray[Any], size: int, row: int, column: int) -> NDArray[Any]:
    out = image.copy()
    for y in range(row - size // 2, row - size // 2 + size):
        for x in range(column - size // 2, column - size // 2 + size):
            if 0 <= y < image.shape[1] and 0 <= x < image.shape[2]:
                out[:, y, x] = 0
    return out


@pytest.mark.parametrize("padding", [1, 3])
def test_pad_crop_moves_each_picture_by_its_own_draw(padding: int) -> None:
    images = pictures()
    out = apply(PadCrop(padding), images, many(12))
    draws = many(12)
    tops, lefts = draws.integers(0, 2 * padding + 1), draws.integers(0, 2 * padding + 1)
    for image, made, top, left in zip(images, out, tops, lefts, strict=True):
        assert np.array_equal(made.numpy(), pad_crop_one(image.numpy(), padding, top, left))
    assert len({(t, c) for t, c in zip(tops.tolist(), lefts.tolist(), strict=True)}) > 3


def test_flip_mirrors_the_pictures_whose_draw_is_below_p() -> None:
    images = pictures(200)
    out = apply(Flip(0.3), images, many(200))
    chosen = many(200).uniform() < 0.3
    for image, made, mirrored in zip(images, out, chosen, strict=True):
        expected = image.numpy()[:, :, ::-1] if mirrored else image.numpy()
        assert np.array_equal(made.numpy(), expected)
    assert 40 < chosen.sum() < 80


@pytest.mark.parametrize("size", [1, 3, 4, 30])
def test_cutout_blanks_a_square_around_its_draw_that_may_reach_over_the_edge(size: int) -> None:
    images = pictures(40)
    out = apply(Cutout(size), images, many(40))
    draws = many(40)
    rows, columns = draws.integers(0, 7), draws.integers(0, 9)
    for image, made, row, column in zip(images, out, rows, columns, strict=True):
        assert np.array_equal(made.numpy(), cutout_one(image.numpy(), size, row, column))


def test_random_resized_crop_is_a_crop_fitted_to_the_square() -> None:
    # Smooth pictures, so that Pillow's filter and ours agree to a grey level or two.
    y, x = np.mgrid[0:40, 0:60]
    smooth = np.stack([2 * y, 2 * x, 100 + y - x]).astype(np.uint8)
    images = torch.from_numpy(np.stack([smooth] * 9))
    crop = RandomResizedCrop(16, scale=(0.2, 1.0))
    out = crop(images, many(9))
    boxes = crop.place(Placing.whole(images), many(9)).boxes
    assert out.shape == (9, 3, 16, 16)
    assert len({tuple(box) for box in boxes.tolist()}) == 9
    for n, (top, left, height, width) in enumerate(boxes.tolist()):
        picture = Image.fromarray(images[n].permute(1, 2, 0).numpy())
        box = (left, top, left + width, top + height)
        reference = picture.crop(box).resize((16, 16), Image.Resampling.BILINEAR)
        difference = np.asarray(reference, int).transpose(2, 0, 1) - out[n].numpy()
        assert abs(difference).max() <= 2


def test_windows_lie_anywhere_inside_pictures_of_any_size() -> None:
    y, x = np.mgrid[0:9, 0:12]
    place = torch.from_numpy(np.stack([y, x, 0 * x]).astype(np.uint8))
    out = RandomCrop(8)(place.expand(300, -1, -1, -1), many(300))
    corners = {(int(image[0, 0, 0]), int(image[1, 0, 0])) for image in out}
    assert corners == {(top, left) for top in range(2) for left in range(5)}
    middle = CentreCrop((4, 6))(place[None], many(1))
    assert middle[0, 0, :, 0].tolist() == [2, 3, 4, 5]
    assert middle[0, 1, 0].tolist() == [3, 4, 5, 6, 7, 8]
    with pytest.raises(SampleShapeError, match=r"9 x 12 does not hold a window of 10 x 10"):
        RandomCrop(10)(place[None], many(1))


def test_random_resized_crop_averages_what_it_shrinks() -> None:
    # From afar a fine chequerboard is grey; picked pixels would stay black or white.
    board = torch.from_numpy(np.indices((64, 64)).sum(axis=0) % 2 * 255).to(torch.uint8)
    crop = RandomResizedCrop(4, scale=(0.7, 1.0))
    out = crop(board.expand(20, 3, -1, -1).contiguous(), many(20))
    assert out.min() > 110
    assert out.max() < 145


def test_a_chain_is_one_after_the_other_with_draws_of_their_own() -> None:
    images = pictures()
    chained = Chain([PadCrop(2), Flip(), Cutout(3)])(images, many(12))
    draws = many(12)
    by_hand = Cutout(3)(Flip()(PadCrop(2)(images, draws), draws), draws)
    assert torch.equal(chained, by_hand)
    # Flip after PadCrop uses the third draw, not PadCrop's first.
    assert not torch.equal(
        chained, Cutout(3)(Flip()(PadCrop(2)(images, many(12)), many(12)), draws)
    )


ALL = [PadCrop(2), Flip(), Cutout(4), RandomResizedCrop(7), Chain([PadCrop(1), Flip()])]


@pytest.mark.parametrize("augment", ALL, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_type_and_channels_last_are_kept(augment: Any, dtype: torch.dtype) -> None:
    # Channels last is how pictures lie in the slab, and how convolutions like them.
    images = pictures(height=9, width=9).to(dtype).contiguous(memory_format=torch.channels_last)
    out = apply(augment, images, many(12))
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("augment", ALL, ids=lambda a: type(a).__name__)
def test_the_layout_in_memory_makes_no_difference_to_the_pixels(augment: Any) -> None:
    images = pictures(height=9, width=9)
    outs = [
        apply(augment, images.contiguous(memory_format=layout), many(12))
        for layout in (torch.contiguous_format, torch.channels_last)
    ]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], images[..., : outs[0].shape[-2], : outs[0].shape[-1]])


@pytest.mark.parametrize("augment", ALL, ids=lambda a: type(a).__name__)
def test_a_picture_is_augmented_alike_whoever_else_is_in_its_batch(augment: Any) -> None:
    images = pictures()
    ids, serves = list(range(12)), [n % 3 for n in range(12)]
    together = apply(augment, images, Draws(keys(ids, serves)))
    for n in range(12):
        alone = apply(augment, images[n : n + 1], Draws(keys([ids[n]], [serves[n]])))
        assert torch.equal(together[n], alone[0])


# ---- the loader's use of them -------------------------------------------------------------------


class Pictures:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return pictures()[index], index


def looks(**options: Any) -> dict[int, list[bytes]]:
    """What each sample looked like, serve by serve, over one pass."""
    loader = ReuseLoader(Pictures(), 2, reuse=4, buffer_batches=2, workers=1, **options)
    seen: dict[int, list[bytes]] = {}
    for images, ids in loader:
        for image, i in zip(images, ids.tolist(), strict=True):
            seen.setdefault(i, []).append(image.numpy().tobytes())
    return seen


def test_without_reaugment_every_serve_looks_like_the_first() -> None:
    anew, frozen = looks(augment=PadCrop(3)), looks(augment=PadCrop(3), reaugment=False)
    assert all(len(set(serves)) == 1 for serves in frozen.values())
    assert all(frozen[i][0] == anew[i][0] for i in range(6))
    assert sum(len(set(serves)) for serves in anew.values()) > 18


@pytest.mark.parametrize(
    "transform",
    [
        v2.RandomCrop(7, padding=3),
        v2.RandomHorizontalFlip(),
        v2.RandomResizedCrop(7, antialias=True),
        v2.Compose([v2.RandomCrop(7, padding=2), v2.RandomHorizontalFlip()]),
        v2.RandAugment(),
    ],
    ids=lambda t: type(t).__name__,
)
def test_a_transform_of_torchvision_draws_anew_for_each_sample_and_reproducibly(
    transform: Any,
) -> None:
    images = pictures(1).expand(40, -1, -1, -1).contiguous()
    before = torch.random.get_rng_state()
    first = run_augmentation(transform, images, many(40))
    assert torch.equal(torch.random.get_rng_state(), before), "the program's own draws go on"
    torch.manual_seed(99)
    assert torch.equal(run_augmentation(transform, images, many(40)), first)
    assert not torch.equal(run_augmentation(transform, images, many(40, seed=1)), first)
    assert len({image.numpy().tobytes() for image in first}) > 1
    torch.random.set_rng_state(before)
    part = run_augmentation(transform, images[3:5], Draws(many(40).keys[3:5]))
    assert torch.equal(part, first[3:5])


def test_a_transform_of_one_argument_sees_one_picture_and_one_of_two_a_batch() -> None:
    shapes: list[tuple[int, ...]] = []

    def one(image: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(image.shape))
        return image

    def batch(images: torch.Tensor, draws: Draws) -> torch.Tensor:
        shapes.append((*images.shape, len(draws.keys)))
        return images

    def with_default(image: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        shapes.append(tuple(image.shape))
        return image

    for augment in (one, batch, with_default):
        run_augmentation(augment, pictures(2), many(2))
    assert shapes == [*[(3, 7, 9)] * 4, *[(2, 3, 7, 9, 2)] * 2, *[(3, 7, 9)] * 4], "made twice"


def test_a_frozen_transform_of_torchvision_repeats_its_first_serve() -> None:
    frozen = looks(augment=v2.RandomCrop(7, padding=3), reaugment=False)
    anew = looks(augment=v2.RandomCrop(7, padding=3))
    assert all(len(set(serves)) == 1 for serves in frozen.values())
    assert any(len(set(serves)) > 1 for serves in anew.values())
    assert all(frozen[i][0] == anew[i][0] for i in range(6))
