"""Colours against torchvision's functions, one picture at a time, with the numbers drawn for it."""

from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples
from torchvision.transforms.v2 import functional

from loaders.errors import LoaderError
from loaders.pixels.augmentation import Draws, draw_keys
from loaders.pixels.color import ColorJitter, Normalize, ToFloat

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAYOUTS = [torch.contiguous_format, torch.channels_last]
law = settings(max_examples=examples(40), deadline=None)


def many(count: int, seed: int = 0) -> Draws:
    return Draws(draw_keys(seed, 0, np.arange(count), np.zeros(count, np.int64)))


def pictures(count: int = 11, channels: int = 3, height: int = 7, width: int = 9) -> torch.Tensor:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    values[0], values[1] = 0, 255
    return torch.from_numpy(values)


def jittered_by_torchvision(
    image: torch.Tensor, order: tuple[int, ...], factors: tuple[float, ...]
) -> torch.Tensor:
    adjustments = (
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
    )
    for kind in order:
        image = adjustments[kind](image, factors[kind])
    return image


def drawn_for(
    jitter: tuple[Any, Any, Any], count: int, seed: int
) -> tuple[list[tuple[int, ...]], list[tuple[float, ...]]]:
    """Orders and factors: one draw for the order, then one for each adjustment."""
    draws = many(count, seed)
    orders = [list(permutations(range(3)))[k] for k in draws.integers(0, 6).tolist()]
    bounds = [b if isinstance(b, tuple) else (max(0, 1 - b), 1 + b) for b in jitter]
    factors = zip(*(draws.uniform(low, high).tolist() for low, high in bounds), strict=True)
    return orders, list(factors)


spread = st.one_of(
    st.floats(0, 1.5), st.tuples(st.floats(0, 1), st.floats(1, 3)), st.just((0.0, 0.0))
)


@law
@given(
    spreads=st.tuples(spread, spread, spread),
    channels=st.sampled_from([1, 3]),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1000),
)
def test_jitter_is_torchvisions_for_each_picture_with_its_own_factors_and_order(
    spreads: tuple[Any, Any, Any], channels: int, layout: torch.memory_format, seed: int
) -> None:
    images = pictures(channels=channels).to(memory_format=layout)
    out = ColorJitter(*spreads)(images.clone(), many(11, seed))
    assert out.dtype == torch.uint8
    for image, made, order, factors in zip(images, out, *drawn_for(spreads, 11, seed), strict=True):
        expected = jittered_by_torchvision(image, order, factors)
        error = 0.0  # a level for each rounding, carried through the adjustments after it
        for kind in order:
            error = error * (factors[kind] + abs(1 - factors[kind])) + 1
        assert abs(made.int() - expected.int()).max() <= error


def test_jitter_of_floats_stays_between_0_and_1_and_is_torchvisions() -> None:
    images = pictures().float() / 255
    spreads = (0.9, 0.9, 0.9)
    out = ColorJitter(*spreads)(images.clone(), many(11))
    assert out.dtype == torch.float32
    for image, made, order, factors in zip(images, out, *drawn_for(spreads, 11, 0), strict=True):
        assert torch.allclose(made, jittered_by_torchvision(image, order, factors), atol=1e-5)


def test_every_order_occurs_and_matters() -> None:
    images = pictures(3, height=16, width=16)[2:].repeat(300, 1, 1, 1)
    out = ColorJitter((1.7, 1.7), (0.4, 0.4), (1.9, 1.9))(images, many(300))
    looks = Counter(image.numpy().tobytes() for image in out)
    assert len(looks) == 6
    assert min(looks.values()) > 25  # of 50


@pytest.mark.parametrize("value", [-0.1, (0.5, 0.2), (-1.0, 1.0)])
def test_a_range_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(LoaderError, match="no range of a colour's factor"):
        ColorJitter(brightness=value)(pictures(), many(11))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 4, 11])
def test_normalize_is_torchvisions_for_levels_and_for_floats(
    layout: torch.memory_format, count: int
) -> None:
    images = pictures(11).to(memory_format=layout)[:count]
    floats = functional.to_dtype(images, torch.float32, scale=True)
    expected = functional.normalize(floats, list(MEAN), list(STD))
    for given_ in (images, floats):
        out = Normalize(MEAN, STD, ToFloat(by_product=True))(
            given_.clone(memory_format=torch.preserve_format), many(count)
        )
        assert out.dtype == torch.float32
        assert torch.equal(out, expected)
        assert out.stride() == torch.empty_like(given_).stride(), "the layout stays"


def test_one_mean_and_std_serve_all_channels_and_a_wrong_number_is_refused() -> None:
    images = pictures()
    one = Normalize((0.5,), (0.25,))(images, many(11))
    assert torch.equal(one, (images.float() / 255 - 0.5) / 0.25)
    with pytest.raises(LoaderError, match="mean of 2 values, pictures have 3 channels"):
        Normalize((0.5, 0.5), (0.25,))(images, many(11))


def test_to_float_scales_levels_and_leaves_floats_alone() -> None:
    images = pictures()
    out = ToFloat()(images, many(11))
    assert torch.equal(out, images.float() / 255)
    assert torch.equal(ToFloat()(out, many(11)), out)
    assert ToFloat()(out.double(), many(11)).dtype == torch.float32


@pytest.mark.parametrize("step", [ToFloat(), Normalize(MEAN, STD), ColorJitter(0.4)])
def test_whole_numbers_other_than_bytes_are_refused(step: Any) -> None:
    with pytest.raises(LoaderError, match=r"pictures of torch\.int32"):
        step(pictures().int(), many(11))


def test_jitter_of_other_than_1_or_3_channels_is_refused() -> None:
    with pytest.raises(LoaderError, match="1 or 3 channels, not 4"):
        ColorJitter(0.4)(pictures(channels=4), many(11))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("step", [ToFloat(), Normalize(MEAN, STD), ColorJitter(0.8, 0.8, 0.8)])
def test_a_gpu_gives_the_same_colours(step: Any) -> None:
    images = pictures()
    here = step(images.clone(), many(11))
    there = step(images.cuda(), many(11)).cpu()
    if here.dtype == torch.uint8:
        assert abs(here.int() - there.int()).max() <= 3
    else:
        assert torch.allclose(here, there, atol=1e-5)
