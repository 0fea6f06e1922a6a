"""Batched augmentation with per-sample randomness, drawn anew at every serve.

    Chain([RandomResizedCrop(224), Flip(), Normalize(...)])
           '------- placed, then rendered at once ------'   '-- on the rendered batch --'

A random number here is a function of (seed, pass, sample id, serve, how many were drawn before),
not of a generator's history: the same for any number of workers, the same after a resume. To freeze
a sample's augmentation (`reaugment=False`), every serve draws as its first one did.

An augmentation is a function (images, draws) -> images over a batch [N, C, H, W]. The batch is its
own: it may write into it. Those that only move pixels say where (`placing`), and one pass over the
pixels does them all, straight out of the slots of the slab.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.errors import SampleShapeError
from loaders.placing import Images, Lying, Placing, render

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive numbers over the bits
MASK = (1 << 64) - 1

TRIES = 10  # as torchvision's


class Draws:
    """Random numbers for one batch, one a sample and call."""

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self.keys = keys
        self._drawn = 0

    def uniform(self, low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
        self._drawn += 1
        bits = _mix(self.keys + np.uint64(self._drawn * GOLDEN & MASK))
        unit = (bits >> np.uint64(11)).astype(np.float64) / float(1 << 53)
        return low + (high - low) * unit

    def many(self, count: int) -> NDArray[np.float64]:
        """The next `count` draws from 0 to 1 of every sample at once: [count, samples]."""
        numbers = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        bits = _mix(self.keys + (numbers * np.uint64(GOLDEN))[:, None])
        return (bits >> np.uint64(11)).astype(np.float64) / float(1 << 53)

    def integers(self, low: int, high: int) -> NDArray[np.int64]:
        """Uniform on low, ..., high - 1."""
        return np.floor(self.uniform(low, high)).astype(np.int64)


def draw_keys(
    seed: int, pass_index: int, ids: NDArray[np.int64], serves: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """One key for every sample of a batch."""
    run = np.array([(seed * GOLDEN + pass_index + 1) & MASK], dtype=np.uint64)
    return _mix(_mix(_mix(run) + ids.astype(np.uint64)) + serves.astype(np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Augmentation(Protocol):
    def __call__(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Called for each batch on a worker's thread, several batches at once."""
        ...


class Geometric(ABC):
    """Moves pixels and does nothing else to them: it only says where they come from."""

    stage: ClassVar[int]
    """1 box, 2 mirror, 3 hole: one step of each stage, in this order, is one pass over the
    pixels."""
    any_size: ClassVar[bool] = False
    """Whether the pictures of a batch may differ in size before this step."""

    @abstractmethod
    def place(self, placing: Placing, draws: Draws) -> Placing: ...

    def __call__(self, images: Images, draws: Draws) -> torch.Tensor:
        return Chain([self])(images, draws)


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other."""

    steps: Sequence[Augmentation | Geometric]

    def __call__(self, images: Images, draws: Draws) -> torch.Tensor:
        placing: Placing | None = None
        for step in self.steps:
            if not isinstance(step, Geometric):
                images, placing = step(_rendered(images, placing), draws), None
                continue
            if placing is not None and step.stage <= placing.stage:
                images, placing = render(images, placing), None
            if placing is None:
                if isinstance(images, Lying) and not (step.any_size or images.one_size):
                    images = images.gather()  # which says what is wrong
                placing = Placing.whole(images)
            placing = step.place(placing, draws)
        return _rendered(images, placing)


def takes_lying(augment: object) -> bool:
    """Whether it reads pictures where they lie; a user's own function takes a tensor."""
    return isinstance(augment, Chain | Geometric)


def _rendered(images: Images, placing: Placing | None) -> torch.Tensor:
    if placing is not None:
        return render(images, placing)
    return images.gather() if isinstance(images, Lying) else images


@dataclass(frozen=True, slots=True)
class PadCrop(Geometric):
    """Pad with zeros, then crop back to the size at a random place: a shift by up to `padding`."""

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
class RandomResizedCrop(Geometric):
    """A box of random area and shape, fitted to `size`: torchvision's distribution.

    Ten tries to draw a box that lies within the picture; if none does, the largest central box of
    an allowed shape. How pixels are blended: see `kernels`.
    """

    stage = 1
    any_size = True
    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    """Least and largest share of the picture's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Of width over height."""

    def place(self, placing: Placing, draws: Draws) -> Placing:
        tall, wide = placing.boxes[:, 2:].T.astype(np.float64)
        # All tries are drawn for everybody: a sample's numbers never depend on its batch mates.
        drawn = draws.many(2 * TRIES + 2)
        least, most = self.scale
        area = tall * wide * (least + (most - least) * drawn[:TRIES])
        narrow, broad = np.log(self.ratio)
        shape = np.exp(narrow + (broad - narrow) * drawn[TRIES : 2 * TRIES])
        heights, widths = np.rint(np.sqrt(area / shape)), np.rint(np.sqrt(area * shape))
        fits = (heights > 0) & (heights <= tall) & (widths > 0) & (widths <= wide)
        first, each, found = fits.argmax(axis=0), np.arange(len(tall)), fits.any(axis=0)
        down, right = drawn[2 * TRIES :]
        height, width = heights[first, each], widths[first, each]
        if not found.all():
            height = np.where(found, height, np.minimum(tall, np.rint(wide / self.ratio[0])))
            width = np.where(found, width, np.minimum(wide, np.rint(tall * self.ratio[1])))
        top = np.where(found, np.floor(down * (tall - height + 1)), (tall - height) // 2)
        left = np.where(found, np.floor(right * (wide - width + 1)), (wide - width) // 2)
        return placing.fitted(np.stack([top, left, height, width], axis=1), _sides(self.size))


@dataclass(frozen=True, slots=True)
class RandomCrop(Geometric):
    """A window of `size` at a random place; pictures of any size that hold it."""

    stage = 1
    any_size = True
    size: int | tuple[int, int]

    def place(self, placing: Placing, draws: Draws) -> Placing:
        room = _room(placing, _sides(self.size))
        corners = np.floor(draws.many(2).T * (room + 1)).astype(np.int64)
        return placing.windowed(corners, _sides(self.size))


@dataclass(frozen=True, slots=True)
class CentreCrop(Geometric):
    """The middle window of `size`: what evaluation sees where training crops."""

    stage = 1
    any_size = True
    size: int | tuple[int, int]

    def place(self, placing: Placing, draws: Draws) -> Placing:
        sides = _sides(self.size)
        return placing.windowed(_room(placing, sides) // 2, sides)


def _sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _room(placing: Placing, sides: tuple[int, int]) -> NDArray[np.int64]:
    """How far a window of these sides may be moved in each picture."""
    room = placing.boxes[:, 2:].astype(np.int64) - sides
    if (room < 0).any():
        height, width = placing.boxes[(room < 0).any(axis=1)][0, 2:].tolist()
        raise SampleShapeError(
            f"a picture of {height} x {width} does not hold a window of {sides[0]} x {sides[1]}:"
            " store larger pictures, or crop smaller windows"
        )
    return room
