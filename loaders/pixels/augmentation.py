"""Augmentation of whole batches, with random numbers for each sample and each serve.

    Chain([RandomResizedCrop(224), Flip(), Normalize(...)])
           '------- placed, then rendered at once ------'   '-- on the rendered batch --'

A random number is a function of (seed, pass, sample id, serve, how many were drawn before), and not
of a generator's history. So it is the same for any number of workers, and after a resume. Where a
sample's augmentation is frozen (`reaugment=False`), every serve draws as the first one did.

An augmentation is a function (images, draws) -> images of a batch [N, C, H, W], and may write into
the batch. Augmentations that only move pixels say where the pixels come from (`placing`); then one
pass over the pixels does all of these moves, straight out of the slots of the slab.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.blocks import floats_like
from loaders.errors import SampleShapeError
from loaders.pixels.crops import Box, Crops, Sides
from loaders.pixels.placing import Images, Placing, SlotPictures, render

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, which spreads consecutive numbers over the bits
MASK = (1 << 64) - 1

TRIES = 10  # as torchvision's

FloatMemory = Callable[[torch.Tensor], torch.Tensor]
"""Gives memory for the float32 values that the pixels of a tensor become."""


class Draws:
    """Random numbers for one batch. Every call draws one number for each sample."""

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self.keys = keys
        self._drawn = 0

    def uniform(self, low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
        return low + (high - low) * self.many(1)[0]

    def many(self, count: int) -> NDArray[np.float64]:
        """The next `count` draws of every sample, uniform from 0 to 1: [count, samples]."""
        numbers = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        bits = _mix(self.keys + (numbers * np.uint64(GOLDEN))[:, None])
        return (bits >> np.uint64(11)).astype(np.float64) / float(1 << 53)

    def integers(self, low: int, high: int) -> NDArray[np.int64]:
        """Draw uniformly from low, ..., high - 1."""
        return np.floor(self.uniform(low, high)).astype(np.int64)


def draw_keys(
    seed: int, pass_index: int, ids: NDArray[np.int64], serves: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """One key for each sample of a batch."""
    run = np.array([(seed * GOLDEN + pass_index + 1) & MASK], dtype=np.uint64)
    return _mix(_mix(_mix(run) + ids.astype(np.uint64)) + serves.astype(np.uint64))


def view_keys(keys: NDArray[np.uint64], view: int) -> NDArray[np.uint64]:
    """The keys of one of several views of the same serves. View 0 draws as a serve's only one."""
    return keys if view == 0 else _mix(_mix(keys) + np.uint64(view))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Augmentation(Protocol):
    def __call__(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Augment a batch. Workers' threads call it, for several batches at the same time."""
        ...


class Converting(ABC):
    """An augmentation that makes floats of uint8, without draws."""

    @abstractmethod
    def convert(self, images: torch.Tensor, memory: FloatMemory) -> torch.Tensor:
        """The floats: those of uint8 in what `memory` gives."""

    def __call__(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        return self.convert(images, floats_like)


class Geometric(ABC):
    """An augmentation that only moves pixels. It says where they come from."""

    stage: ClassVar[int]
    """1 box, 2 mirror, 3 hole. One step of each, in this order, needs one pass over the pixels."""
    any_size: ClassVar[bool] = False
    """Whether the pictures of a batch may differ in size before this step."""

    @abstractmethod
    def place(self, placing: Placing, draws: Draws) -> Placing:
        """`placing` with this step added."""

    def __call__(self, images: Images, draws: Draws) -> torch.Tensor:
        return Chain([self])(images, draws)


class Cropping(Geometric):
    """A geometric step that shows one box of a picture of any size. What it draws does not depend
    on the size, so the box is known before the picture is decoded."""

    stage = 1
    any_size = True

    size: int | Sides
    """What the box is fitted to."""

    @abstractmethod
    def drawn(self, draws: Draws) -> NDArray[np.float64]:
        """What is drawn for each sample: [numbers, samples]."""

    @abstractmethod
    def box(self, drawn: Sequence[float], height: int, width: int) -> Box:
        """The box that `place` finds for one picture of this size, from what was drawn for it."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Augmentations that are applied one after the other."""

    steps: Sequence[Augmentation | Geometric]

    def __call__(self, images: Images, draws: Draws) -> torch.Tensor:
        return self.apply(images, draws)[0]

    def apply(self, images: Images, draws: Draws) -> tuple[torch.Tensor, tuple[Placing, ...]]:
        """The augmented pictures, and where they were placed, one move after the other."""
        placing: Placing | None = None
        done: list[Placing] = []
        memory = images.blocks.floats_like if isinstance(images, SlotPictures) else floats_like
        for step in self.steps:
            if isinstance(step, Chain):
                images, inner = step.apply(_render(images, placing, done), draws)
                done, placing = [*done, *inner], None
                continue
            if not isinstance(step, Geometric):
                moved, placing = _render(images, placing, done), None
                converts = isinstance(step, Converting)
                images = step.convert(moved, memory) if converts else step(moved, draws)
                continue
            if placing is not None and step.stage <= placing.stage:
                images, placing = _render(images, placing, done), None
            if placing is None:
                if isinstance(images, SlotPictures) and not (step.any_size or images.one_size):
                    images = images.gather()  # this raises the error that names the sizes
                placing = Placing.whole(images)
            placing = step.place(placing, draws)
        return _render(images, placing, done), tuple(done)


def first_step(augment: object) -> "Cropping | None":
    """The crop that an augmentation begins with. None: all of a picture may be seen."""
    if isinstance(augment, Chain):
        return first_step(augment.steps[0]) if augment.steps else None
    return augment if isinstance(augment, Cropping) else None


def crops_of(firsts: Sequence["Cropping"], keys: NDArray[np.uint64], samples: int) -> list[Crops]:
    """What is seen of each of `samples` samples. `keys` are those of all serves of the first
    sample, then of the second, and so on; the views of a serve begin with `firsts`."""
    drawn = [first.drawn(Draws(view_keys(keys, n))).T.tolist() for n, first in enumerate(firsts)]
    serves, sizes = len(keys) // max(samples, 1), [sides_of(first.size) for first in firsts]

    def crops_of(sample: int) -> Crops:
        mine = range(sample * serves, (sample + 1) * serves)

        def boxes(height: int, width: int) -> list[Box]:
            return [
                first.box(each[serve], height, width)
                for serve in mine
                for first, each in zip(firsts, drawn, strict=True)
            ]

        return Crops(boxes, sizes)

    return [crops_of(sample) for sample in range(samples)]


def reads_slots(augment: object) -> bool:
    """Whether it reads pictures in their slots. A user's own function takes a tensor."""
    return isinstance(augment, Chain | Geometric)


def _render(images: Images, placing: Placing | None, done: list[Placing]) -> torch.Tensor:
    if placing is not None:
        done.append(placing)
        return render(images, placing)
    return images.gather() if isinstance(images, SlotPictures) else images


@dataclass(frozen=True, slots=True)
class PadCrop(Geometric):
    """Pad with zeros and crop back to the size at a random place, up to `padding` away."""

    stage = 1
    padding: int

    def place(self, placing: Placing, draws: Draws) -> Placing:
        span = 2 * self.padding + 1
        downs = draws.integers(0, span) - self.padding
        rights = draws.integers(0, span) - self.padding
        return placing.moved(downs, rights)


@dataclass(frozen=True, slots=True)
class Flip(Geometric):
    """Mirror left and right, with probability `p`."""

    stage = 2
    p: float = 0.5

    def place(self, placing: Placing, draws: Draws) -> Placing:
        return placing.mirrored(draws.uniform() < self.p)


@dataclass(frozen=True, slots=True)
class Cutout(Geometric):
    """Zero a random square of `size` pixels; it may reach over the edge."""

    stage = 3
    size: int

    def place(self, placing: Placing, draws: Draws) -> Placing:
        height, width = placing.size
        tops = draws.integers(0, height) - self.size // 2
        lefts = draws.integers(0, width) - self.size // 2
        sides = np.full_like(tops, self.size)
        return placing.cut(np.stack([tops, lefts, sides, sides], axis=1))


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(Cropping):
    """Resize a box of random area and shape to `size`, with torchvision's distribution.

    A box that lies within the picture is drawn in up to ten tries. If none does, it is the largest
    central box of an allowed shape. `kernels` describes how pixels are blended.
    """

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    """The least and the largest share of the picture's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """The least and the largest ratio of width to height."""

    def drawn(self, draws: Draws) -> NDArray[np.float64]:
        # All tries are drawn for every sample, so that a sample's numbers do not depend on the
        # other samples of its batch.
        drawn = draws.many(2 * TRIES + 2)
        least, most = self.scale
        narrow, broad = np.log(self.ratio)
        drawn[:TRIES] = least + (most - least) * drawn[:TRIES]
        drawn[TRIES:-2] = np.exp(narrow + (broad - narrow) * drawn[TRIES:-2])
        return drawn

    def box(self, drawn: Sequence[float], height: int, width: int) -> Box:
        *_, down, right = drawn
        for share, shape in zip(drawn[:TRIES], drawn[TRIES:-2], strict=True):
            area = height * width * share
            tall, wide = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
            if 0 < tall <= height and 0 < wide <= width:
                top, left = int(down * (height - tall + 1)), int(right * (width - wide + 1))
                return top, left, tall, wide
        tall = min(height, round(width / self.ratio[0]))
        wide = min(width, round(height * self.ratio[1]))
        return (height - tall) // 2, (width - wide) // 2, tall, wide

    def place(self, placing: Placing, draws: Draws) -> Placing:
        """Does what `box` does, for a whole batch at a quarter of the time."""
        tall, wide = placing.boxes[:, 2:].T.astype(np.float64)
        drawn = self.drawn(draws)
        area, shape = tall * wide * drawn[:TRIES], drawn[TRIES:-2]
        heights, widths = np.rint(np.sqrt(area / shape)), np.rint(np.sqrt(area * shape))
        fits = (heights > 0) & (heights <= tall) & (widths > 0) & (widths <= wide)
        first, each, any_fits = fits.argmax(axis=0), np.arange(len(tall)), fits.any(axis=0)
        down, right = drawn[-2:]
        height, width = heights[first, each], widths[first, each]
        if not any_fits.all():
            height = np.where(any_fits, height, np.minimum(tall, np.rint(wide / self.ratio[0])))
            width = np.where(any_fits, width, np.minimum(wide, np.rint(tall * self.ratio[1])))
        top = np.where(any_fits, np.floor(down * (tall - height + 1)), (tall - height) // 2)
        left = np.where(any_fits, np.floor(right * (wide - width + 1)), (wide - width) // 2)
        return placing.fitted(np.stack([top, left, height, width], axis=1), sides_of(self.size))


@dataclass(frozen=True, slots=True)
class RandomCrop(Cropping):
    """Crop a window of `size` at a random place. Pictures may have any size that holds it."""

    size: int | tuple[int, int]

    def drawn(self, draws: Draws) -> NDArray[np.float64]:
        return draws.many(2)

    def box(self, drawn: Sequence[float], height: int, width: int) -> Box:
        tall, wide = sides_of(self.size)
        down, right = drawn
        return int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide

    def place(self, placing: Placing, draws: Draws) -> Placing:
        room = _room(placing, sides_of(self.size))
        corners = np.floor(self.drawn(draws).T * (room + 1)).astype(np.int64)
        return placing.windowed(corners, sides_of(self.size))


@dataclass(frozen=True, slots=True)
class CentreCrop(Cropping):
    """Crop the middle window of `size`. Evaluation uses it where training crops at random."""

    size: int | tuple[int, int]

    def drawn(self, draws: Draws) -> NDArray[np.float64]:
        return draws.many(0)

    def box(self, drawn: Sequence[float], height: int, width: int) -> Box:
        tall, wide = sides_of(self.size)
        return (height - tall) // 2, (width - wide) // 2, tall, wide

    def place(self, placing: Placing, draws: Draws) -> Placing:
        sides = sides_of(self.size)
        return placing.windowed(_room(placing, sides) // 2, sides)


def sides_of(size: int | Sides) -> Sides:
    return (size, size) if isinstance(size, int) else size


def _room(placing: Placing, sides: tuple[int, int]) -> NDArray[np.int64]:
    """How far a window with these sides can be moved in each picture."""
    room = placing.boxes[:, 2:].astype(np.int64) - sides
    if (room < 0).any():
        height, width = placing.boxes[(room < 0).any(axis=1)][0, 2:].tolist()
        raise SampleShapeError(
            f"a picture of {height} x {width} does not hold a window of {sides[0]} x {sides[1]}:"
            " store larger pictures, or crop smaller windows"
        )
    return room
