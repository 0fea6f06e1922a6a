"""Where each picture of a batch is cropped, mirrored and cut. The pixels are then moved once.

    PadCrop, RandomResizedCrop -> Flip -> Cutout      each only says where: a `Placing`
                                          |
                       render: read where the picture lies, write into the batch

Where pictures lie in the slab as bytes, one call of a compiled kernel renders them straight out of
the slots. Anything else (a GPU, floating point) is rendered by torch, with the same bits for
uint8.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.blocks import Blocks
from loaders.errors import SampleShapeError
from loaders.pixels import kernels
from loaders.pixels.kernels import Pictures
from loaders.pixels.moving import Boxes, moved


@dataclass(frozen=True, slots=True)
class SlotPictures:
    """The pictures of a batch, read where they lie: in the slots of the slab, or in a tensor."""

    pictures: Pictures
    planes: int
    """The number of planes of each picture, each of which is listed as a picture of one channel. It
    is 1 where the channels of a pixel lie side by side."""
    whole_sizes: NDArray[np.int32] | None
    """The sizes of pictures of which only the served crop lies there. Zeros, or None: all of it."""
    blocks: Blocks
    gather: Callable[[], torch.Tensor]
    """Copies the pictures into a batch."""

    @property
    def depth(self) -> int:
        """The number of channels of each picture."""
        return self.planes * self.pictures.channels

    @property
    def sizes(self) -> NDArray[np.int32]:
        """The height and width of each picture."""
        each = slice(None, None, self.planes)
        sizes = np.stack([self.pictures.heights[each], self.pictures.widths[each]], axis=1)
        cropped = self.whole_sizes
        return sizes if cropped is None else np.where(cropped, cropped, sizes)

    @property
    def one_size(self) -> bool:
        sizes = self.sizes
        return bool((sizes == sizes[0]).all())


Images = torch.Tensor | SlotPictures


def picture_sizes(images: Images) -> NDArray[np.int32]:
    """The height and width of each picture of a batch."""
    if isinstance(images, SlotPictures):
        return images.sizes
    return np.tile(np.array(images.shape[-2:], dtype=np.int32), (len(images), 1))


@dataclass(frozen=True, slots=True)
class Placing:
    """A box of each picture, which is fitted to `size`, then mirrored, then gets a hole."""

    boxes: Boxes
    """Top, left, height, width. Unless `resized`, they have `size`, and may reach over the edge."""
    size: tuple[int, int]
    resized: bool
    flips: NDArray[np.bool_]
    holes: Boxes | None
    stage: int
    """The last stage that was decided: 1 box, 2 mirror, 3 hole. 0: none was."""

    @classmethod
    def whole(cls, images: Images) -> "Placing":
        """Every picture as it is. Where sizes differ, `size` is that of the first picture."""
        sizes = picture_sizes(images)
        if isinstance(images, SlotPictures):
            check_shape((images.depth, *sizes[0].tolist()))
        else:
            check_shape(images.shape[1:])
        boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        size = (int(sizes[0, 0]), int(sizes[0, 1]))
        return cls(boxes, size, False, np.zeros(len(sizes), dtype=bool), None, 0)

    def select(self, samples: slice) -> "Placing":
        """The placing of some of the pictures."""
        holes = None if self.holes is None else self.holes[samples]
        return replace(self, boxes=self.boxes[samples], flips=self.flips[samples], holes=holes)

    def moved(self, downs: NDArray[np.int64], rights: NDArray[np.int64]) -> "Placing":
        boxes = self.boxes.copy()
        boxes[:, 0] += downs.astype(np.int32)
        boxes[:, 1] += rights.astype(np.int32)
        return replace(self, boxes=boxes, stage=1)

    def windowed(self, corners: NDArray[np.int64], size: tuple[int, int]) -> "Placing":
        boxes = np.concatenate([corners, np.full_like(corners, size)], axis=1)
        return replace(self, boxes=boxes.astype(np.int32), size=size, stage=1)

    def fitted(self, boxes: NDArray[np.float64], size: tuple[int, int]) -> "Placing":
        return replace(self, boxes=boxes.astype(np.int32), size=size, resized=True, stage=1)

    def mirrored(self, flips: NDArray[np.bool_]) -> "Placing":
        return replace(self, flips=flips, stage=2)

    def cut(self, holes: NDArray[np.int64]) -> "Placing":
        return replace(self, holes=np.ascontiguousarray(holes, dtype=np.int32), stage=3)


MOST_CHANNELS = 4
"""So many numbers at the end of an array whose first sides are longer are a pixel's channels."""


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


def render(images: Images, placing: Placing) -> torch.Tensor:
    if isinstance(images, SlotPictures):
        return _render_by_kernel(images, placing)
    planes = reshaped(images, (len(images), prod(images.shape[1:-2]), *images.shape[-2:]))
    if images.device.type == "cpu" and images.dtype == torch.uint8:
        made = _render_by_kernel(_batch_in_place(planes), placing)
    else:
        made = moved(
            planes.movedim(-3, -1), placing.boxes, placing.size, placing.resized, placing.flips,
            placing.holes,
        ).movedim(-1, -3)  # fmt: skip
    return reshaped(made, (*images.shape[:-2], *placing.size))


def pictures_in_place(pictures: Sequence[torch.Tensor], blocks: Blocks) -> SlotPictures | None:
    """Pictures [C, H, W] where they lie, if each is bytes over rows of pixels. None: one is not."""
    shapes = [picture.shape for picture in pictures]
    for picture, shape in zip(pictures, shapes, strict=True):
        rows = len(shape) == 3 and picture.stride() == (1, shape[2] * shape[0], shape[0])
        if not rows or picture.dtype != torch.uint8 or shape[0] != shapes[0][0]:
            return None
    at = Pictures(
        np.array([picture.data_ptr() for picture in pictures], dtype=np.uintp),
        np.array([shape[1] for shape in shapes], dtype=np.int32),
        np.array([shape[2] for shape in shapes], dtype=np.int32),
        shapes[0][0],
        pictures,
    )
    return SlotPictures(at, 1, None, blocks, lambda: torch.stack(list(pictures)))


def _batch_in_place(images: torch.Tensor) -> SlotPictures:
    """A batch of bytes as pictures where they lie."""
    count, channels, height, width = images.shape
    interleaved = images.permute(0, 2, 3, 1)
    memory, planes = (interleaved, 1) if interleaved.is_contiguous() else (images, channels)
    memory = memory.contiguous()
    each = height * width * (channels if planes == 1 else 1)
    pictures = Pictures(
        np.arange(count * planes, dtype=np.uintp) * np.uintp(each) + np.uintp(memory.data_ptr()),
        np.full(count * planes, height, dtype=np.int32),
        np.full(count * planes, width, dtype=np.int32),
        channels if planes == 1 else 1,
        memory,
    )
    return SlotPictures(pictures, planes, None, Blocks(0), lambda: images)


def _render_by_kernel(images: SlotPictures, placing: Placing) -> torch.Tensor:
    pictures, planes = images.pictures, images.planes
    count = len(pictures) // planes
    boxes, flips, holes = placing.boxes, placing.flips, placing.holes
    resized = placing.resized
    if images.whole_sizes is not None:
        cropped = images.whole_sizes[:, :1] > 0
        boxes = np.where(cropped, np.array([0, 0, *placing.size], dtype=np.int32), boxes)
        resized = resized and not cropped.all()
    if planes > 1:
        boxes, flips = np.repeat(boxes, planes, axis=0), np.repeat(flips, planes)
        holes = None if holes is None else np.repeat(holes, planes, axis=0)
    out = images.blocks.array((len(pictures), *placing.size, pictures.channels), np.dtype(np.uint8))
    if resized:
        kernels.resized_crop(pictures, boxes, flips, holes, out)
    else:
        corners = np.ascontiguousarray(boxes[:, :2])
        kernels.window(pictures, corners, flips, holes, out)
    batch = torch.from_numpy(out)
    if planes == 1:
        return batch.permute(0, 3, 1, 2)
    return batch.reshape(count, planes, *placing.size)
