"""Where a torchvision transform is cut, and that both halves together mean what it meant."""

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.products import examples
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from loaders.adopting.transforms import PerSample, TransformSplit, split_transform
from loaders.errors import LoaderError
from loaders.pixels.augmentation import Augmentation, Chain, Draws, Flip, draw_keys

FLOAT = v2.ToDtype(torch.float32, scale=True)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
law = settings(max_examples=examples(60), deadline=None)
both = pytest.mark.parametrize("v", [v1, v2], ids=["v1", "v2"])


def picture(seed: int = 0, height: int = 20, width: int = 24, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def stored(form: Any) -> torch.Tensor:
    """As a slot keeps it: [C, H, W] of a picture, a tensor or array as it is."""
    if isinstance(form, Image.Image):
        return v1.PILToTensor()(form)
    return torch.from_numpy(form.copy()) if isinstance(form, np.ndarray) else torch.Tensor(form)


def as_stored(form: Any) -> torch.Tensor:
    return form.as_subclass(torch.Tensor).clone() if torch.is_tensor(form) else stored(form)


def decoded(split: TransformSplit, given_: Any) -> Any:
    return given_ if split.decode is None else split.decode(given_)


def serve(split: TransformSplit, images: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A batch of as many samples."""
    draws = Draws(draw_keys(seed, 0, np.arange(len(images)), np.zeros(len(images), np.int64)))
    assert split.batched
    return images if split.augment is None else cast(Any, split.augment)(images, draws)


def names(split: TransformSplit) -> list[str]:
    return [type(step).__name__ for step in split.decode.steps] if split.decode else []


def steps(split: TransformSplit) -> list[Augmentation]:
    assert split.batched
    return [] if split.augment is None else list(cast(Chain, split.augment).steps)


# ---- where it is cut ----------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("make", "cached", "why"),
    [
        (lambda v: [v.Resize(8), v.RandomCrop(4), v.CenterCrop(2)], 1, "RandomCrop is random"),
        (lambda v: [v.Grayscale(3), v.ColorJitter(0.4)], 1, "ColorJitter is random"),
        (lambda v: [v.Pad(1), v.GaussianBlur(3)], 1, "GaussianBlur is random"),
        (lambda v: [v.Resize(8), v.PILToTensor(), v.Lambda(abs)], 2, "Lambda may be random"),
        (lambda v: [v.CenterCrop(8), lambda x: x, v.Pad(1)], 1, "<lambda> may be random"),
        (lambda v: [v.RandomApply([v.Pad(1)]), v.Pad(1)], 0, "RandomApply is random"),
        (lambda v: [v.PILToTensor(), v.Normalize(MEAN, STD)], 1, "four times the memory"),
        (lambda v: [v.PILToTensor(), v.ConvertImageDtype(torch.float)], 1, "turns bytes into"),
        (lambda v: [v.Resize(8), v.CenterCrop(4)], 2, ""),
        (lambda v: [], 0, ""),
    ],
)
def test_what_is_known_to_be_the_same_every_time_is_cached_up_to_the_first_that_is_not(
    make: Callable[[Any], list[Any]], cached: int, why: str, v: Any
) -> None:
    chain = make(v)
    split = split_transform(chain)
    assert names(split) == [type(step).__name__ for step in chain[:cached]]
    assert list(split.rest) == chain[cached:]
    assert why in split.report
    for step in chain:
        assert getattr(step, "__name__", type(step).__name__) in split.report


@pytest.mark.parametrize(
    "wrap",
    [
        v1.Compose,
        v2.Compose,
        lambda steps: nn.Sequential(*steps),
        list,
        tuple,
        lambda steps: v1.Compose([v2.Compose(steps[:1]), nn.Sequential(*steps[1:])]),
    ],
)
def test_every_way_to_put_transforms_in_a_row_is_looked_into(wrap: Callable[..., Any]) -> None:
    split = split_transform(wrap([v2.Resize(8), v2.ToImage(), v2.RandomHorizontalFlip(0.3)]))
    assert names(split) == ["Resize", "ToImage"]
    assert steps(split) == [Flip(0.3)]


def test_a_class_that_only_looks_like_torchvisions_is_not_trusted() -> None:
    class Resize(v2.Resize):
        pass

    class Sequential(nn.Sequential):
        pass

    assert names(split_transform([Resize(8)])) == []
    assert names(split_transform(Sequential(v2.Resize(8)))) == []


# ---- by the batch -------------------------------------------------------------------------------


def plain_chain() -> st.SearchStrategy[list[Any]]:
    """Steps whose outcome is certain, in any order that torchvision takes."""
    early = st.lists(
        st.sampled_from([v2.RandomHorizontalFlip(1.0), v2.RandomHorizontalFlip(0.0)])
        | st.sampled_from([v2.ColorJitter((0.5, 0.5)), v2.ColorJitter(0, (2.0, 2.0))])
        | st.just(v2.ColorJitter(saturation=(0.3, 0.3))),
        max_size=3,
    )
    late = st.lists(
        st.sampled_from([v2.RandomHorizontalFlip(1.0), v2.Normalize(MEAN, STD), v2.Identity()])
        | st.sampled_from([FLOAT, v2.ColorJitter((0.7, 0.7))]),
        max_size=4,
    )
    return st.tuples(early, late).map(lambda p: [v2.ToImage(), *p[0], FLOAT, *p[1]])


@law
@given(plain_chain())
def test_steps_by_the_batch_give_what_torchvision_gives(chain: list[Any]) -> None:
    split = split_transform(chain)
    pictures = [picture(n) for n in range(3)]
    batch = torch.stack([as_stored(decoded(split, each)) for each in pictures])
    made = serve(split, batch)
    for out, each in zip(made, pictures, strict=True):
        expected = v2.Compose(chain)(each)
        assert out.dtype == expected.dtype
        # A jittered byte may differ by a level, here and there.
        assert ((out - expected).abs() > 1e-4).float().mean() < 0.02


@both
@pytest.mark.parametrize(
    ("before", "given_", "known"),
    [
        (lambda v: [v.CenterCrop(8)], None, True),
        (lambda v: [v.Resize((8, 8))], None, True),
        (lambda v: [v.Resize(8)], (20, 20), True),
        (lambda v: [v.Resize(8)], (20, 21), False),
        (lambda v: [v.Resize(8)], None, False),
        (lambda v: [v.CenterCrop(8), v.Pad(1)], None, False),
        (lambda v: [v.RandomCrop(10, padding=2)], (10, 10), False),
        (lambda v: [v.Grayscale(3)], (8, 8), True),
        (lambda v: [], (8, 8), True),
        (lambda v: [], (8, 9), False),
        (lambda v: [], None, False),
    ],
)
def test_a_crop_is_a_shift_only_where_pictures_are_known_to_have_its_size(
    before: Callable[[Any], list[Any]], given_: Any, known: bool, v: Any
) -> None:
    split = split_transform([*before(v), v.RandomCrop(8, padding=2)], size=given_)
    assert split.batched == known
    assert known or "RandomCrop to 8 x 8 has one with a border only" in split.report


# ---- by the picture -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        ([v1.RandomCrop(8, padding=2, padding_mode="reflect")], "same black border"),
        ([v2.RandomCrop(8, padding=2, fill=7)], "same black border"),
        ([v2.RandomCrop(8, padding=2, fill={tv_tensors.Image: 3, "others": 0})], "black border"),
        ([v1.RandomCrop(8, padding=(1, 2))], "same black border"),
        ([v2.ColorJitter(hue=0.1)], "hue"),
        ([v2.RandomRotation(10)], "RandomRotation has none"),
        ([v2.RandomHorizontalFlip(), v2.RandomErasing()], "RandomErasing has none"),
        ([v1.RandomChoice([v1.RandomHorizontalFlip()])], "RandomChoice has none"),
        ([v2.RandomHorizontalFlip(), v2.CenterCrop(4)], "CenterCrop has none"),
        ([v2.ToImage(), v2.ToDtype(torch.float32)], "ToDtype has none"),
        ([FLOAT, v2.ToImage()], "ToDtype has none"),
        ([lambda image: image], "<lambda> has none"),
    ],
)
def test_what_means_something_else_by_the_batch_stays_by_the_picture(
    chain: list[Any], why: str
) -> None:
    split = split_transform(chain, (8, 8))
    assert not split.batched
    assert isinstance(split.augment, PerSample)
    assert (
        f"picture by picture, not by the batch: {why}"
        in split.report.replace("RandomCrop with other than the ", "")
        or why in split.report
    )


ROWS: list[list[Any]] = [
    [v1.Resize(12), v1.RandomCrop(9, padding=1), v1.RandomHorizontalFlip(), v1.ToTensor()],
    [v1.ColorJitter(0.4, 0.4, 0.4, 0.1), v1.ToTensor(), v1.Normalize(MEAN, STD)],
    [v1.RandomResizedCrop(8), v1.ToTensor(), v1.RandomErasing(1.0)],
    [v1.RandomRotation(30), v1.GaussianBlur(3), v1.PILToTensor()],
    [v1.AutoAugment(), v1.ToTensor()],
    [v1.Grayscale(), v1.RandomAffine(10, (0.1, 0.1)), v1.ToTensor()],
    [v1.RandomCrop(9), lambda image: image.rotate(90)],
    [v1.PILToTensor(), v1.RandomCrop(9, padding=1), v1.ConvertImageDtype(torch.float32)],
    [v2.Resize(12), v2.RandomCrop(9, padding=1), v2.ToImage(), FLOAT],
    [v2.ToImage(), v2.RandomResizedCrop(8), v2.RandAugment(), v2.ToPureTensor()],
    [v2.RandomPhotometricDistort(), v2.PILToTensor(), v2.RandomErasing(1.0)],
    [v2.ToImage(), v2.ToPILImage(), v2.RandomRotation(20), v2.ToImage()],
    [v2.RandomRotation(9), v2.ToImage(), FLOAT, v2.GaussianNoise()],
]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_by_the_picture_it_is_torchvisions_to_the_bit_under_the_same_seed(
    row: list[Any], mode: str
) -> None:
    if mode == "L" and any(isinstance(s, v1.Normalize | v2.RandomPhotometricDistort) for s in row):
        pytest.skip("for three channels")
    split = split_transform(row)
    assert not split.batched
    again = pickle.loads(pickle.dumps(split)) if not any(map(is_lambda, row)) else split
    for seed in range(4):
        one = picture(seed, mode=mode)
        torch.manual_seed(seed)
        expected = as_stored(v1.Compose(row)(one))
        kept = as_stored(decoded(split, one))
        for each in (split, split.for_picture(decoded(split, one)), again):
            torch.manual_seed(seed)
            out = cast(Any, each.augment)(kept.clone())
            assert type(out) is torch.Tensor
            assert out.dtype == expected.dtype
            assert torch.equal(out, expected)


def is_lambda(step: Any) -> bool:
    return getattr(step, "__name__", "") == "<lambda>"


def test_pictures_that_are_tensors_are_treated_as_tensors_once_one_was_seen() -> None:
    image = as_stored(picture())
    row = [v2.RandomHorizontalFlip(0.0), FLOAT]
    split = split_transform(row)
    assert not split.batched, "a PIL picture would stay as it is"
    seen = split.for_picture(image)
    assert seen.batched
    assert torch.equal(serve(seen, image[None].clone())[0], FLOAT(image))
    rotated = split_transform([v2.RandomRotation((90, 90))]).for_picture(tv_tensors.Image(image))
    assert cast(PerSample, rotated.augment).form == "image"


def test_pictures_that_are_arrays_are_given_back_as_arrays_to_the_picture() -> None:
    array = np.array(picture())
    row = [v1.ToTensor(), v1.Normalize(MEAN, STD)]
    split = split_transform(row)
    assert split.batched
    seen = split.for_picture(array)
    assert not seen.batched
    assert "arrays [H, W, C]" in seen.report
    out = cast(Any, seen.augment)(stored(array))
    assert torch.equal(out, v1.Compose(row)(array))


@pytest.mark.parametrize("mode", ["P", "CMYK"])
def test_a_picture_whose_pixels_do_not_tell_its_mode_is_refused(mode: str) -> None:
    with pytest.raises(LoaderError, match=f"mode '{mode}' cannot be stored"):
        split_transform(v1.RandomRotation(3)).for_picture(picture(mode=mode))


def test_transforms_that_end_in_no_picture_are_named() -> None:
    split = split_transform([v1.RandomHorizontalFlip(), repr])
    with pytest.raises(LoaderError, match="RandomHorizontalFlip, repr gave a str"):
        cast(Any, split.augment)(as_stored(picture()))


# ---- how often each outcome comes ---------------------------------------------------------------


def outcomes(images: Any) -> Counter[bytes]:
    return Counter(image.numpy().tobytes() for image in images)


@both
def test_a_shifted_and_flipped_picture_has_all_of_torchvisions_outcomes_equally_often(
    v: Any,
) -> None:
    one = picture(height=6, width=6)
    chain = [v.CenterCrop(6), v.RandomCrop(6, padding=1), v.RandomHorizontalFlip(), v.PILToTensor()]
    split = split_transform(chain)
    count = 3600
    mine = outcomes(serve(split, as_stored(decoded(split, one)).repeat(count, 1, 1, 1)))
    torch.manual_seed(0)
    theirs = outcomes(v.Compose(chain)(one) for _ in range(count))
    assert set(mine) == set(theirs)
    assert len(mine) == 18
    assert min(mine.values()) > 140  # of 200
    assert max(mine.values()) < 260
