"""Augmentations of whole batches that change the values of pixels, and not their places.

They have the protocol of `augmentation`, on any device. Pictures may be grey ([N, H, W]) or clips
([N, T, C, H, W], with one draw a clip). uint8 counts from 0 to 255, floating point from 0 to 1.

`ColorJitter` does what torchvision's does, sample by sample, but for hue. It draws a factor f for
each adjustment, and applies them in random order, with clamped values after each:

    brightness  x f                       f < 1: towards black
    contrast    x f + mean (1 - f)        towards the picture's mean grey
    saturation  x f + grey (1 - f)        towards the picture in grey
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.errors import LoaderError
from loaders.pixels.augmentation import Converting, Draws, FloatMemory
from loaders.pixels.placing import as_frames, reshaped

Range = float | tuple[float, float]
"""The range of a factor: (low, high), or `spread` for (1 - spread, 1 + spread), cut at zero."""

LEVELS = 255
IN_CACHE = 4
"""The float pixels of this many pictures stay in a CPU's cache from one operation to the next."""

BRIGHTNESS, CONTRAST, SATURATION = range(3)
ORDERS = tuple(permutations((BRIGHTNESS, CONTRAST, SATURATION)))
GREY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue


@dataclass(frozen=True, slots=True)
class ToFloat(Converting):
    """Turn uint8 levels into float32 between 0 and 1. Floating point becomes float32, unscaled."""

    by_product: bool = False
    """Whether to multiply by 1 / 255, as torchvision's v2 does, and not to divide, as its v1."""

    def convert(self, images: torch.Tensor, memory: FloatMemory) -> torch.Tensor:
        if _whole_levels(images):
            return self.scale(memory(images).copy_(images))
        return images.to(torch.float32)

    def scale(self, levels: torch.Tensor) -> torch.Tensor:
        """Scale floats from 0 to 255, in place."""
        return levels.mul_(1 / LEVELS) if self.by_product else levels.div_(LEVELS)


@dataclass(frozen=True, slots=True)
class Normalize(Converting):
    """Compute (value - mean) / std for each channel. uint8 becomes float32 by `to_float` first."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    to_float: ToFloat = ToFloat()

    def convert(self, images: torch.Tensor, memory: FloatMemory) -> torch.Tensor:
        frames, whole = as_frames(images), _whole_levels(images)
        channels = frames.shape[1]
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise LoaderError(
                    f"Normalize has a {name} of {len(values)} values, pictures have {channels}"
                    " channels: give one value for each channel, or one for all"
                )
        out = memory(frames) if whole else torch.empty_like(frames)
        # They are expanded to one row of the picture, so that the inner loops run along memory.
        row = out[:1, :, :1]
        mean = torch.empty_like(row).copy_(_per_channel(self.mean, out))
        std = torch.empty_like(row).copy_(_per_channel(self.std, out))
        step = IN_CACHE if _in_parts(images.device) else max(len(frames), 1)
        for first in range(0, len(frames), step):
            part = out[first : first + step]
            part.copy_(frames[first : first + step])
            if whole:
                self.to_float.scale(part)
            part.sub_(mean).div_(std)
        return reshaped(out, images.shape)


@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Change brightness, contrast and saturation by random factors, in a random order."""

    brightness: Range = 0.0
    contrast: Range = 0.0
    saturation: Range = 0.0

    def __call__(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        shape, clips, images = images.shape, len(images), as_frames(images)
        if images.shape[1] not in (1, 3):
            raise LoaderError(
                f"ColorJitter needs pictures of 1 or 3 channels, not {images.shape[1]}: leave it"
                " out for such pictures"
            )
        times = len(images) // max(clips, 1)
        order = draws.integers(0, len(ORDERS)).repeat(times)
        ranges = [_range(value) for value in (self.brightness, self.contrast, self.saturation)]
        # A factor is drawn for every adjustment, even an unwanted one, so that later draws do not
        # depend on which are wanted.
        drawn = [draws.uniform(low, high).repeat(times) for low, high in ranges]
        wanted = [bounds != (1.0, 1.0) for bounds in ranges]
        factors = [_factors(values, images) for values in drawn]
        for rows, which in _groups(order, images.device):
            part = images[rows]
            for kind in ORDERS[which]:
                if wanted[kind]:
                    part = _adjust(kind, part, *(f[rows] for f in factors[kind]))
            images[rows] = part
        return reshaped(images, shape)


def _in_parts(device: torch.device) -> bool:
    """Whether a few pictures are processed at a time, which stay in a CPU's cache."""
    return device.type == "cpu"


def _groups(
    order: NDArray[np.int64], device: torch.device
) -> Iterator[tuple[slice | torch.Tensor, int]]:
    """The rows that are processed together, and the number of the order of their adjustments."""
    if _in_parts(device):
        yield from ((slice(n, n + 1), which) for n, which in enumerate(order.tolist()))
        return
    for which in range(len(ORDERS)):
        rows = np.flatnonzero(order == which)
        if len(rows):
            yield torch.from_numpy(rows).to(device, non_blocking=True), which


def _adjust(
    kind: int, images: torch.Tensor, factor: torch.Tensor, rest: torch.Tensor
) -> torch.Tensor:
    most = LEVELS if _whole_levels(images) else 1
    if kind == SATURATION and images.shape[1] == 1:
        return images
    out = images * factor
    if kind == CONTRAST:
        out += _grey(images).mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float32) * rest
    elif kind == SATURATION:
        out += _grey(images) * rest
    return out.clamp_(0, most).to(images.dtype)


def _grey(images: torch.Tensor) -> torch.Tensor:
    """The grey pictures [N, 1, H, W] in floating point, with whole levels for pictures of uint8."""
    if images.shape[1] == 1:
        return images if images.is_floating_point() else images.to(torch.float32)
    red, green, blue = images.split(1, dim=1)
    grey = red.mul(GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])
    return grey.floor_() if _whole_levels(images) else grey


def _range(value: Range) -> tuple[float, float]:
    if isinstance(value, tuple):
        low, high = value
    else:
        low, high = max(1.0 - value, 0.0), 1.0 + value
    if not 0 <= low <= high:
        raise LoaderError(
            f"{value} is no range of a colour's factor: give a number from 0, or (low, high)"
            " with 0 <= low <= high"
        )
    return low, high


def _factors(values: NDArray[np.float64], images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The factors f and 1 - f, one for each picture."""
    dtype = images.dtype if images.is_floating_point() else torch.float32
    return tuple(
        torch.from_numpy(v).to(images.device, dtype, non_blocking=True)[:, None, None, None]
        for v in (values, 1 - values)
    )


def _per_channel(values: Sequence[float], images: torch.Tensor) -> torch.Tensor:
    column = torch.tensor(values, dtype=images.dtype).to(images.device, non_blocking=True)
    return column[None, :, None, None]


def _whole_levels(images: torch.Tensor) -> bool:
    kind = images.dtype
    if kind != torch.uint8 and not (kind.is_floating_point and kind.itemsize > 1):
        raise LoaderError(
            f"pictures of {kind} have no known range of colours: convert them to uint8 (0 to 255)"
            " or floating point of 16 bits or more (0 to 1) in the data set"
        )
    return kind == torch.uint8
