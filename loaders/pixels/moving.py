"""What the compiled kernels do, by torch: on any device, for any type of number.

For uint8 the bits are those of the kernels. So it also stands in where they were not compiled.
"""

from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.pixels.crops import Sides

Boxes = NDArray[np.int32]
BITS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def moved(
    pixels: torch.Tensor,
    boxes: Boxes,
    size: Sides,
    resized: bool,
    flips: NDArray[np.bool_],
    holes: Boxes | None,
) -> torch.Tensor:
    """A batch [N, H, W, C] with each box fitted to `size` or, if it is not `resized`, the window of
    that size at its corner; mirrored where `flips` says so, then with holes of zeros."""
    made = _resize(pixels, boxes, size) if resized else _window(_bits(pixels), boxes, size)
    out = _bits(made)
    if flips.any():
        mirrored = torch.from_numpy(flips).to(pixels.device)
        out = torch.where(mirrored[:, None, None, None], out.flip(-2), out)
    if holes is not None:
        tops, lefts, heights, widths = torch.from_numpy(holes).to(pixels.device).T
        rows = _mask(size[0], tops, heights)
        columns = _mask(size[1], lefts, widths)
        out = out.masked_fill((rows[:, :, None] & columns[:, None, :])[..., None], 0)
    return out.view(pixels.dtype).contiguous()


def _bits(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels as whole numbers of as many bytes: torch moves some types only so."""
    return pixels.view(BITS.get(pixels.dtype.itemsize, pixels.dtype))


def _mask(extent: int, first: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    places = torch.arange(extent, device=first.device)
    return (places >= first[:, None]) & (places < (first + length)[:, None])


def _window(pixels: torch.Tensor, corners: Boxes, size: Sides) -> torch.Tensor:
    tops, lefts = torch.from_numpy(corners[:, :2]).to(pixels.device).long().T
    rows = tops[:, None] + torch.arange(size[0], device=pixels.device)
    columns = lefts[:, None] + torch.arange(size[1], device=pixels.device)
    height, width = pixels.shape[1:3]
    batch = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    picked = pixels[
        batch, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]
    ]
    inside = ((rows >= 0) & (rows < height))[:, :, None]
    inside = inside & ((columns >= 0) & (columns < width))[:, None, :]
    return picked.masked_fill(~inside[..., None], 0)


def _resize(pixels: torch.Tensor, boxes: Boxes, size: Sides) -> torch.Tensor:
    kind = pixels.dtype
    plain = kind == torch.uint8 or kind.is_complex or (kind.is_floating_point and kind.itemsize > 1)
    if not plain:  # torch does not interpolate whole numbers and floats of 8 bits
        wide = _resize(pixels.double(), boxes, size)
        return (wide if kind.is_floating_point else wide.round()).to(kind)
    tops, lefts, heights, widths = torch.from_numpy(boxes).to(pixels.device).long().T
    rows = _resample(pixels, tops, heights, size[0])
    columns = _resample(rows.transpose(1, 2), lefts, widths, size[1])
    return columns.transpose(1, 2)


def _resample(
    pixels: torch.Tensor, firsts: torch.Tensor, extents: torch.Tensor, size: int
) -> torch.Tensor:
    """Resample a batch along dimension 1, as `kernels` describes: picture i from `firsts[i]` on."""
    exact = pixels.dtype == torch.uint8
    box = (extents // size).clamp(min=1)
    count = extents // box
    step = (extents << 32) // (size * box)
    order = torch.arange(size, device=pixels.device)
    places = (step // 2 - (1 << 31))[:, None] + step[:, None] * order
    places = torch.minimum(places.clamp(min=0), ((count - 1) << 32)[:, None])
    first = places >> 32
    weight = ((places & 0xFFFFFFFF) * 127 + (1 << 31)) >> 32
    batch = torch.arange(len(pixels), device=pixels.device)[:, None]

    def boxed(number: torch.Tensor) -> torch.Tensor:
        """The mean of the `box` pixels that boxed pixel `number` stands for."""
        most = int(box.max())
        at = firsts[:, None] + number * box[:, None]
        total = pixels[batch, at].to(torch.int32 if exact else pixels.dtype)
        for further in range(1, most):
            belongs = (further < box)[:, None, None, None]
            more = pixels[batch, (at + further).clamp(max=pixels.shape[1] - 1)]
            total = total + more * belongs
        each = box[:, None, None, None]
        return (total + each // 2) // each if exact else total / each

    before, after = boxed(first), boxed(torch.minimum(first + 1, (count - 1)[:, None]))
    w = weight[:, :, None, None]
    if exact:
        blend = before * (127 - w) + after * w
        return ((blend * 258 + 16384) >> 15).to(torch.uint8)
    return torch.lerp(before, after, (w / 127).to(before.dtype))
