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
from support.products import examples
from torchvision.transforms import v2

from loaders import ReuseLoader
from loaders.augment import (
    CentreCrop,
    Chain,
    ColorJitter,
    Cutout,
    Flip,
    Normalize,
    PadCrop,
    RandomCrop,
    RandomResizedCrop,
    ToFloat,
)
from loaders.batching.batches import BatchMaker
from loaders.blocks import Blocks
from loaders.errors import LoaderError, SampleShapeError
from loaders.pixels.augmentation import Draws, draw_keys
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


# ---- against references -------------------------------------------------------------------------


def cutout_one(image: NDArray[Any], size: int, row: int, column: int) -> NDArray[Any]:
    out = image.copy()
    for y in range(row - size // 2, row - size // 2 + size):
        for x in range(column - size // 2, column - size // 2 + size):
            if 0 <= y < image.shape[1] and 0 <= x < image.shape[2]:
                out[:, y, x] = 0
    return out


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
def test_a_picture_is_augmented_alike_whoever_else_is_in_its_batch(augment: Any) -> None:
    images = pictures()
    ids, serves = list(range(12)), [n % 3 for n in range(12)]
    together = apply(augment, images, Draws(keys(ids, serves)))
    for n in range(12):
        alone = apply(augment, images[n : n + 1], Draws(keys([ids[n]], [serves[n]])))
        assert torch.equal(together[n], alone[0])


# ---- the loader's use of them -------------------------------------------------------------------


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


STEPS: dict[str, Any] = {
    "flip": Flip(),
    "pad": PadCrop(2),
    "hole": Cutout(3),
    "crop": RandomCrop((1, 2)),
    "centre": CentreCrop((1, 1)),
    "resized": RandomResizedCrop((4, 6)),
    "chain": Chain([RandomResizedCrop(5), Flip(), Cutout(2)]),
    "float": ToFloat(),
    "normalize": Normalize((0.4,), (0.2,)),
    "jitter": ColorJitter(0.4, 0.4, 0.4),
}
KINDS = [torch.uint8, torch.float32, torch.float16, torch.int16, torch.uint16, torch.bool]
NESTS: dict[str, Callable[[Any, int], Any]] = {
    "alone": lambda picture, _: picture,
    "tuple": lambda picture, n: (picture, n),
    "dict": lambda picture, n: {"label": n, "picture": picture},
}
COUNT = 5


class Shaped:
    """Pictures that are given, each in a nest."""

    def __init__(self, pictures: torch.Tensor, nest: str) -> None:
        self._pictures, self._nest = pictures, NESTS[nest]

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> Any:
        return self._nest(self._pictures[index], index)


def random_pictures(shape: tuple[int, ...], kind: torch.dtype, gaps: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    top = 200 if kind in (torch.uint8, torch.int16, torch.uint16) else 1
    made = torch.rand(COUNT, *(shape[::-1] if gaps else shape), generator=generator)
    if gaps:
        made = made.permute(0, *range(made.ndim - 1, 0, -1))
    return (made > 0.5) if kind is torch.bool else (made * top).to(kind)


def served(pictures: torch.Tensor, step: Any, nest: str = "alone", reuse: int = 2) -> torch.Tensor:
    """The pictures of a pass in the order of the serves, which depends on nothing but their
    number."""
    given: dict[str, Any] = {"batch_size": 3, "augment": step, "seed": 1, "workers": 1}
    with ReuseLoader(Shaped(pictures, nest), reuse=reuse, **given) as loader:
        found = list(loader)
    match nest:
        case "tuple":
            found = [batch[0] for batch in found]
        case "dict":
            found = [batch["picture"] for batch in found]
    return torch.cat(found)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_grey_pictures_and_clips_are_changed_as_pictures_of_channels_are(
    step: str, kind: torch.dtype, gaps: bool
) -> None:
    clips = random_pictures((4, 3, 8, 9), kind, gaps)
    if step in ("float", "normalize", "jitter") and kind in (torch.int16, torch.uint16, torch.bool):
        with pytest.raises(LoaderError, match="have no known range of colours"):
            changed(clips, step)
        return
    for frame in range(4):
        exactly(changed(clips, step)[:, frame], changed(clips[:, frame], step))
    exactly(changed(clips[:, 0, 0], step)[:, None], changed(clips[:, 0, :1], step))


def changed(pictures: torch.Tensor, step: str) -> torch.Tensor:
    if step == "jitter":  # the mean that the contrast needs depends on the layout in memory
        pictures = pictures.contiguous()
    return STEPS[step](pictures.clone(), Draws(np.arange(len(pictures), dtype=np.uint64)))


def exactly(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("reuse", [1, 2])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32], ids=str)
def test_a_loader_serves_them_so(kind: torch.dtype, reuse: int, nest: str) -> None:
    clips, step = random_pictures((4, 3, 8, 9), kind), STEPS["chain"]
    exactly(served(clips, step, nest, reuse)[:, 2], served(clips[:, 2], step, nest, reuse))
    grey, plane = clips[:, 0, 0], clips[:, 0, :1]
    exactly(served(grey, step, nest, reuse)[:, None], served(plane, step, nest, reuse))


SMALL = [(1, 1), (32, 32), (3, 1, 1), (5, 1, 1), (2, 1, 1, 1), (6, 8, 9)]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small_pictures_and_ones_of_many_channels_stay_apart(shape: tuple[int, ...]) -> None:
    pictures = random_pictures(shape, torch.uint8)
    made = served(pictures, Flip(1.0), reuse=1)
    flipped = {picture.flip(-1).numpy().tobytes() for picture in pictures}
    assert made.shape == pictures.shape
    assert {picture.contiguous().numpy().tobytes() for picture in made} == flipped


WRONG = {
    "a row": (8,), "a number": (), "no rows": (3, 0, 5), "no planes": (0, 8, 9), "nothing": (0, 5),
    "channels last": (32, 32, 3), "grey, last": (32, 32, 1), "with alpha": (32, 32, 4),
    "frames, last": (6, 32, 32, 3), "no frames": (0, 3, 8, 9), "clips of views": (2, 4, 3, 8, 9),
}  # fmt: skip


@pytest.mark.parametrize("shape", WRONG)
def test_other_shapes_are_refused_with_the_shape_and_what_to_do(shape: str) -> None:
    pictures = random_pictures(WRONG[shape], torch.uint8)
    for step in STEPS:
        if step != "float":  # which does the same to every number
            with pytest.raises(SampleShapeError, match=r"here a picture is \(.*\): "):
                changed(pictures, step)
    for nest in NESTS:
        with pytest.raises(LoaderError, match=r"here a picture is|no picture to augment: leave"):
            served(pictures, Flip(), nest)
