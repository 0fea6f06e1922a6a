"""The shapes in which pictures come to an augmentation of ours, behind the dimension of the batch.

    [C, H, W]       as planes of [N, C, H, W]        as frames of [N, C, H, W]
    [H, W]          grey:     [N, 1, H, W]           [N, 1, H, W]
    [T, C, H, W]    a clip:   [N, T * C, H, W]       [N * T, C, H, W]

What moves pixels goes by planes, so all pictures of a clip are moved alike. Colours go by frames.
"""

from collections.abc import Sequence
from math import prod

import torch

from loaders.errors import SampleShapeError

MOST_CHANNELS = 4
"""So many numbers at the end of an array, where its first sides are longer, are a pixel's
channels."""


def as_planes(images: torch.Tensor) -> torch.Tensor:
    return reshaped(images, (len(images), prod(images.shape[1:-2]), *images.shape[-2:]))


def as_frames(images: torch.Tensor) -> torch.Tensor:
    check_shape(images.shape[1:])
    frames = images[:, None] if images.ndim == 3 else images
    return reshaped(frames, (prod(frames.shape[:-3]), *frames.shape[-3:]))


def reshaped(images: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Pictures in another shape. In the same shape they keep their layout in memory."""
    return images if images.shape == tuple(shape) else images.reshape(tuple(shape))


def check_shape(shape: Sequence[int]) -> None:
    """Refuse the shape of a sample that is none of these."""
    rows, height, width = (1, 1, 1, *shape)[-3:]
    if not 2 <= len(shape) <= 4:
        why = "let the data set return one of these, or give a function of your own as augment"
    elif 0 in shape:
        why = "it has no pixels, so leave such samples out of the data set"
    elif len(shape) > 2 and min(rows, height) > MOST_CHANNELS >= width:
        why = "that looks like [..., H, W, C], so let the data set return it with C before H and W"
    else:
        return
    raise SampleShapeError(
        "the augmentations of loaders.augment change pictures [C, H, W], grey ones [H, W] and clips"
        f" [T, C, H, W], and here a picture is {tuple(shape)}: {why}"
    )
