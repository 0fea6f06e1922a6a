"""What goes with a picture moves as the picture was moved: masks, boxes, key points.

    Chain(pictures, draws) -> pictures, and the placings that were rendered, one after the other
                                        |
              Moves: the same boxes, mirrors and sizes for every other part of the samples

A mask takes the nearest pixel; beyond the edge it is 0. A box lies between edges: x from 0 to the
width. It is cut off at the picture's edge, and one of which nothing is left becomes four zeros, so
it keeps its row. A key point lies on the middle of a pixel: x from 0 to the width - 1. It moves on
when it leaves the picture, but with a visibility all three numbers become 0. A hole moves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.errors import SampleShapeError
from loaders.pixels.placing import Placing, render

PartKind = Literal["picture", "mask", "boxes_xyxy", "boxes_xywh", "boxes_cxcywh", "points", "still"]
"""How a part of a sample goes with its picture. "picture": another picture, of the same height and
width; "still": not at all."""
PART_KINDS: tuple[PartKind, ...] = get_args(PartKind)
SLACK = 1.0
"""Boxes may reach so many pixels over the edge, because annotations are rounded."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moves:
    """How the pictures of some samples were moved."""

    ids: NDArray[np.int64]
    """The samples. An error names the one that it is about."""
    sizes: NDArray[np.int32]
    """The height and width of each picture, before it was moved."""
    placings: tuple[Placing, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def only(self, number: int) -> "Moves":
        """The moves of a single sample."""
        which = slice(number, number + 1)
        placings = tuple(placing.select(which) for placing in self.placings)
        return Moves(self.ids[which], self.sizes[which], placings)

    def size(self, number: int) -> tuple[int, int]:
        """The height and width of a picture, after it was moved."""
        height, width = self.placings[-1].size if self.placings else self.sizes[number].tolist()
        return height, width

    def check_size(self, number: int, size: tuple[int, int], what: str) -> None:
        """Refuse a part that belongs to a picture of another size."""
        if tuple(self.sizes[number].tolist()) != size:
            height, width = self.sizes[number].tolist()
            raise SampleShapeError(
                f"{what} of sample {self.ids[number]} is for a picture of {size[0]} x {size[1]},"
                f" and its picture (a tensor [..., height, width]) is {height} x {width}: let the"
                " data set return both in one size"
            )


def move_parts(
    kind: PartKind, parts: Sequence[torch.Tensor], moves: Moves, place: str
) -> list[torch.Tensor]:
    """The part at `place` of each sample, moved with its picture. Nobody else holds the result."""
    if kind == "still" or not moves.placings:
        return [part.clone() for part in parts]
    if kind == "mask":
        return [_mask(part, moves, n, place) for n, part in enumerate(parts)]
    if kind == "picture":
        return [_picture(part, moves, n, place) for n, part in enumerate(parts)]
    if len({part.shape for part in parts}) > 1:
        each = (move_parts(kind, [p], moves.only(n), place) for n, p in enumerate(parts))
        return [part for (part,) in each]
    values = torch.stack(list(parts)).double().numpy()
    made = _points(values, moves, place) if kind == "points" else _boxes(values, kind, moves, place)
    return list(_of_dtype(made, parts[0].dtype, place).unbind())


def _of_dtype(values: Numbers, dtype: torch.dtype, place: str) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.from_numpy(values).to(dtype)
    info = torch.iinfo(dtype)
    whole = np.rint(values)
    fits = ((whole >= info.min) & (whole <= info.max)) | np.isnan(whole)
    if not fits.all():
        raise SampleShapeError(
            f"part {place} has places of {dtype}, which do not hold {whole[~fits][0]:.0f}: return"
            " them as floats or as int64"
        )
    return torch.from_numpy(whole).to(dtype)


def _mask(mask: torch.Tensor, moves: Moves, number: int, place: str) -> torch.Tensor:
    _check_sides(mask, moves, number, place)
    sides: list[torch.Tensor] = []
    inside: list[NDArray[np.bool_]] = []
    for axis in (0, 1):
        extent = int(moves.sizes[number, axis])
        places = np.arange(extent)
        there = np.ones(extent, dtype=bool)
        for placing in moves.placings:
            further = _nearest(placing, number, axis)
            within = (further >= 0) & (further < len(places))
            further = further.clip(0, len(places) - 1)
            places, there = places[further], there[further] & within
        sides.append(torch.from_numpy(places))
        inside.append(there)
    moved = mask.index_select(-2, sides[0]).index_select(-1, sides[1])
    for dim, there in zip((-2, -1), inside, strict=True):
        if not there.all():
            moved.index_fill_(dim, torch.from_numpy(np.flatnonzero(~there)), 0)
    return moved


def _nearest(placing: Placing, number: int, axis: int) -> NDArray[np.int64]:
    """The row (axis 0) or column that is nearest to each row or column of the output."""
    size, first = placing.size[axis], int(placing.boxes[number, axis])
    order = np.arange(size, dtype=np.int64)
    if placing.resized:
        extent = int(placing.boxes[number, axis + 2])
        places = first + (2 * order + 1) * extent // (2 * size)
    else:
        places = first + order
    return places[::-1] if axis == 1 and placing.flips[number] else places


def _picture(picture: torch.Tensor, moves: Moves, number: int, place: str) -> torch.Tensor:
    _check_sides(picture, moves, number, place)
    pixels = picture[None]
    for placing in moves.only(number).placings:
        pixels = render(pixels, placing)
    return pixels[0]


def _check_sides(part: torch.Tensor, moves: Moves, number: int, place: str) -> None:
    if part.ndim < 2:
        raise SampleShapeError(
            f"part {place} of sample {moves.ids[number]} is {tuple(part.shape)}, but a mask or a"
            " picture is [..., height, width]"
        )
    moves.check_size(number, (part.shape[-2], part.shape[-1]), f"part {place}")


def _boxes(values: Numbers, kind: PartKind, moves: Moves, place: str) -> Numbers:
    if values.ndim < 2 or values.shape[-1] != 4:
        raise SampleShapeError(
            f"part {place} of sample {moves.ids[0]} is {values.shape[1:]}, but boxes are [..., 4]"
        )
    layout = kind.removeprefix("boxes_")
    corners = _corners(values.reshape(len(moves), -1, 4), layout)
    _check_inside(corners, layout, moves, place)
    for placing in moves.placings:
        moved = _place(corners.reshape(len(moves), -1, 2, 2), placing, edges=True)
        flips = placing.flips[:, None, None]
        moved[..., 0] = np.where(flips, moved[..., ::-1, 0], moved[..., 0])
        moved = moved.clip(0, np.array(placing.size[::-1], dtype=np.float64))
        gone = (moved[..., 0, :] >= moved[..., 1, :]).any(axis=-1)
        moved[gone] = 0
        corners = moved.reshape(corners.shape)
    return _in_layout(corners, layout).reshape(values.shape)


def _corners(boxes: Numbers, layout: str) -> Numbers:
    if layout == "xyxy":
        return boxes
    at, sides = boxes[..., :2], boxes[..., 2:]
    first = at if layout == "xywh" else at - sides / 2
    return np.concatenate([first, first + sides], axis=-1)


def _in_layout(corners: Numbers, layout: str) -> Numbers:
    if layout == "xyxy":
        return corners
    first, last = corners[..., :2], corners[..., 2:]
    at = first if layout == "xywh" else (first + last) / 2
    return np.concatenate([at, last - first], axis=-1)


def _check_inside(corners: Numbers, layout: str, moves: Moves, place: str) -> None:
    if not corners.size:
        return
    limits = moves.sizes[:, None, ::-1] + SLACK
    first, last = corners[..., :2], corners[..., 2:]
    fits = (first >= -SLACK) & (last <= limits) & (first <= last)  # what is no number does not fit
    if fits.all():
        return
    number, row = np.argwhere(~fits.all(axis=-1))[0].tolist()
    height, width = moves.sizes[number].tolist()
    box = _in_layout(corners[number, row], layout).tolist()
    raise SampleShapeError(
        f"box {row} in part {place} of sample {moves.ids[number]} is {box} as {layout}, which is no"
        f" box inside its picture of {height} x {width} pixels (height x width): give boxes in"
        " pixels, cut off at the edges of the picture, and in the layout that they have"
    )


def _points(values: Numbers, moves: Moves, place: str) -> Numbers:
    if values.ndim < 2 or values.shape[-1] not in (2, 3):
        raise SampleShapeError(
            f"part {place} of sample {moves.ids[0]} is {values.shape[1:]}, but key points are"
            " [..., 2] (x, y), or [..., 3] (x, y, visibility)"
        )
    points = values.reshape(len(moves), -1, values.shape[-1]).copy()
    where, seen = points[..., :2], points[..., 2:] != 0
    for placing in moves.placings:
        where = _place(where[:, :, None], placing, edges=False)[:, :, 0]
        beyond = np.array(placing.size[::-1]) - 0.5
        seen &= ((where >= -0.5) & (where < beyond)).all(axis=-1, keepdims=True)
    points[..., :2] = where
    if points.shape[-1] == 3:
        points = np.where(seen, points, 0)
    return points.reshape(values.shape)


def _place(places: Numbers, placing: Placing, edges: bool) -> Numbers:
    """Places [samples, n, k, (x, y)] where the pictures were put. With `edges`, whole numbers lie
    between pixels, else on the middle of a pixel."""
    half = 0.0 if edges else 0.5
    first = placing.boxes[:, None, None, 1::-1].astype(np.float64)
    size = np.array(placing.size[::-1], dtype=np.float64)
    moved = places + half - first
    if placing.resized:
        moved *= size / placing.boxes[:, None, None, :1:-1]
    mirrored = size[0] - moved[..., 0]
    moved[..., 0] = np.where(placing.flips[:, None, None], mirrored, moved[..., 0])
    return moved - half
