"""Transforms that a loader cuts in two: what goes in, what a slot keeps, what is served."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from loaders.adopting.transforms import TransformSplit
from loaders.pixels.augmentation import Draws, draw_keys

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
