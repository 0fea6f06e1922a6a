"""From the slots of a batch to the batch: samples are gathered, augmented and put together.

    on a worker's thread           slots -> pictures augmented straight out of them, rest gathered
    on the consumer's own thread   a user's one-argument transform, a user's collate function

User code may draw from the generators that all threads share (torch, numpy, random). So it runs on
the consumer's thread, one sample at a time. For each sample the generators are seeded by its key,
and afterwards put back (`transforming`).
"""

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.blocks import Blocks
from loaders.errors import LoaderError
from loaders.pixels.augmentation import Augmentation, Draws, reads_slots
from loaders.pixels.placing import Images, SlotPictures
from loaders.slots.leaves import as_tensor
from loaders.slots.slab import Slab
from loaders.sources.randomness import seeded_randomness
from loaders.stats import BatchInfo
from loaders.transforming import RepetitionCheck, SeededFunction

# A batch is nested as the user's samples are: only its leaves have types here.
Batch = Any
Collate = Callable[[list[Any]], Batch]
Transform = Callable[[Any], Any]
AugmentOn = Literal["cpu", "device"]
SEEDED = "let it draw from torch, numpy.random, random, or generators among its attributes"


@dataclass(frozen=True, slots=True)
class Gathered:
    """A batch as a worker made it. The consumer's thread finishes it."""

    info: BatchInfo
    seconds: float
    """The time that the worker spent on it."""
    columns: list[Any] | None = None
    """Every leaf as a batch, where no user code runs on single samples."""
    samples: list[Any] | None = None
    """The single samples, where user code still has to run on them."""


class BatchMaker:
    """Makes batches of the samples in one slab."""

    def __init__(
        self,
        slab: Slab,
        augment: Augmentation | Transform | None,
        collate: Collate | None,
        keys: Callable[[BatchInfo], NDArray[np.uint64]],
        blocks: Blocks,
        augment_on: AugmentOn = "cpu",
    ) -> None:
        """`keys(info)` gives the key of each sample of a batch, from which its random numbers are
        drawn."""
        if augment is not None and slab.picture is None:
            raise LoaderError(
                "augment was given, but no part of a sample has two dimensions or more, so there is"
                " no picture to augment: leave augment out"
            )
        batched = augment is not None and takes_draws(augment)
        on_device = augment_on == "device"
        if on_device and augment is not None and not (batched and collate is None):
            raise ValueError(
                f'augment_on="device" needs an augment(images, draws) on batches, and no collate'
                f" function; augment is {augment!r}, collate is {collate!r}"
            )
        self._batched = cast(Augmentation, augment) if batched and not on_device else None
        self._on_device = cast(Augmentation, augment) if batched and on_device else None
        self._transform = None
        self._check = RepetitionCheck(augment, "let it draw from `draws` alone")
        if augment is not None and not batched:
            self._transform = SeededFunction(cast(Transform, augment))
            self._check = RepetitionCheck(augment, SEEDED)
        self._slab = slab
        self._collate = None if collate is None else SeededFunction(collate)
        self._in_columns = not (self._transform or self._collate or slab.batches_by_kind)
        """Whether a worker makes whole columns, because no code needs single samples."""
        self._keys = keys
        self._blocks = blocks

    def over(self, slab: Slab) -> "BatchMaker":
        """The same for samples of the same kind in another slab."""
        other = copy.copy(self)
        other._slab = slab
        return other

    def make(self, info: BatchInfo, slots: NDArray[np.int64]) -> Gathered:
        """Make as much of a batch as a worker's thread may."""
        started = time.perf_counter()
        columns = samples = None
        if self._in_columns:
            columns = [
                self._augmented(info, slots)
                if column is self._slab.picture and self._batched is not None
                else column.gather(slots, self._blocks)
                for column in self._slab.columns
            ]
        else:
            samples = [self._slab.sample(slot) for slot in slots.tolist()]
        return Gathered(info, time.perf_counter() - started, columns, samples)

    def finish(self, gathered: Gathered) -> Batch:
        """Make the rest of a batch on the consumer's thread."""
        if gathered.columns is not None:
            return self._slab.nest.batch(gathered.columns)
        samples = gathered.samples or []
        if self._transform is not None or self._batched is not None:
            samples = self._transformed(samples, gathered.info)
        if self._collate is None:
            return torch.utils.data.default_collate(samples)
        return self._collate(samples, int(self._keys(gathered.info)[0]))

    def augmented_on_device(self, info: BatchInfo, batch: Batch) -> Batch:
        """Augment a batch on the training device, where that was asked for."""
        if self._on_device is None:
            return batch
        draws, augment = Draws(self._keys(info)), self._on_device
        return self._slab.with_picture(
            batch, lambda images: augment(images, draws), self._slab.nest.batch
        )

    def _augmented(self, info: BatchInfo, slots: NDArray[np.int64]) -> torch.Tensor:
        picture, augment = self._slab.picture, self._batched
        assert picture is not None and augment is not None

        def gather() -> torch.Tensor:
            return picture.gather(slots, self._blocks)

        images: Images = (
            gather()
            if (at := picture.pictures(slots)) is None
            else SlotPictures(*at, self._blocks, gather)
        )
        if isinstance(images, SlotPictures) and not reads_slots(augment):
            images = images.gather()
        keys = self._keys(info)
        if reads_slots(augment):
            return augment(cast(Any, images), Draws(keys))
        return self._check.call(lambda pixels: augment(pixels, Draws(keys)), images)

    def _transformed(self, samples: Sequence[Any], info: BatchInfo) -> list[Any]:
        """Run the user's own code on each sample's picture, with generators seeded for it."""
        keys = self._keys(info).tolist()
        return [
            self._slab.with_picture(sample, partial(self._changed, key), self._slab.nest.sample)
            for sample, key in zip(samples, keys, strict=True)
        ]

    def _changed(self, key: int, picture: Any) -> Any:
        if (transform := self._transform) is not None:
            return self._check.call(lambda argument: transform(argument, key), picture)
        assert self._batched is not None
        pixels = cast(torch.Tensor, as_tensor(picture))
        with seeded_randomness(key):
            return self._batched(pixels[None], Draws(np.array([key], dtype=np.uint64)))[0]


def takes_draws(augment: Augmentation | Transform) -> bool:
    """Whether `augment` is a function (images, draws) of a batch, and not one of a single image."""
    target = augment.forward if isinstance(augment, torch.nn.Module) else augment
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(target).parameters.values()
    wanted = [p for p in parameters if p.kind in kinds]
    return sum(p.default is p.empty or p.name == "draws" for p in wanted) >= 2
