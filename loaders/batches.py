"""From the slots of a batch to the batch: gather, augment, put together.

    on a worker's thread           slots -> pictures augmented straight out of them, rest gathered
    on the consumer's own thread   a user's one-argument transform, a user's collate function

The second is for code that draws from the generators that everybody shares (torch, numpy, random):
it runs where nobody else does, one sample at a time, with them seeded by the sample's key and put
back afterwards.
"""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.augment import Augmentation, Draws, takes_lying
from loaders.blocks import Blocks
from loaders.errors import LoaderError
from loaders.leaves import as_tensor
from loaders.placing import Images, Lying
from loaders.samplers import seeded_randomness
from loaders.stats import BatchInfo
from loaders.storage import Slab

# A batch is nested as the user's samples are: only its leaves have types here.
Batch = Any
Collate = Callable[[list[Any]], Batch]
Transform = Callable[[Any], Any]
AugmentOn = Literal["cpu", "device"]


@dataclass(slots=True)
class Gathered:
    """What a worker made of a batch, for the consumer's thread to finish."""

    info: BatchInfo
    seconds: float
    columns: list[Any] | None = None
    samples: list[Any] | None = None


class BatchMaker:
    """Makes batches of one slab."""

    def __init__(
        self,
        slab: Slab,
        augment: Augmentation | Transform | None,
        collate: Collate | None,
        keys: Callable[[BatchInfo], NDArray[np.uint64]],
        blocks: Blocks,
        augment_on: AugmentOn = "cpu",
    ) -> None:
        """`keys(info)`: of each sample of a batch, from which its random numbers are drawn."""
        if augment is not None and slab.picture is None:
            raise LoaderError(
                "augment was given, but no part of a sample has two dimensions or more: there is"
                " no picture to augment"
            )
        batched = augment is not None and takes_draws(augment)
        there = augment_on == "device"
        if there and augment is not None and not (batched and collate is None):
            raise ValueError(
                'augment_on="device" needs an augment(images, draws) on batches, and no collate'
                f" function; augment is {augment!r}"
            )
        self._batched = cast(Augmentation, augment) if batched and not there else None
        self._there = cast(Augmentation, augment) if batched and there else None
        self._transform = cast(Transform, augment) if augment is not None and not batched else None
        self._slab = slab
        self._collate = collate
        self._keys = keys
        self._blocks = blocks

    def make(self, info: BatchInfo, slots: NDArray[np.int64]) -> Gathered:
        """Called on a worker's thread."""
        started = time.perf_counter()
        gathered = Gathered(info, 0.0)
        if self._transform is None and self._collate is None:
            gathered.columns = [
                self._augmented(info, slots)
                if column is self._slab.picture and self._batched is not None
                else column.gather(slots, self._blocks)
                for column in self._slab.columns
            ]
        else:
            gathered.samples = [self._slab.sample(slot) for slot in slots.tolist()]
        gathered.seconds = time.perf_counter() - started
        return gathered

    def finish(self, gathered: Gathered) -> Batch:
        """Called on the consumer's thread."""
        if gathered.columns is not None:
            return self._slab.nest.batch(gathered.columns)
        samples = gathered.samples or []
        if self._transform is not None or self._batched is not None:
            samples = self._transformed(samples, gathered.info)
        if self._collate is None:
            return torch.utils.data.default_collate(samples)
        with seeded_randomness(int(self._keys(gathered.info)[0])):
            return self._collate(samples)

    def augmented_there(self, info: BatchInfo, batch: Batch) -> Batch:
        """On the training device, what was left to it."""
        if self._there is None:
            return batch
        draws, augment = Draws(self._keys(info)), self._there
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
            else Lying(*at, self._blocks, gather)
        )
        if isinstance(images, Lying) and not takes_lying(augment):
            images = images.gather()
        return augment(cast(Any, images), Draws(self._keys(info)))

    def _transformed(self, samples: Sequence[Any], info: BatchInfo) -> list[Any]:
        """Each sample's picture through the user's own code, seeded for it."""
        done = []
        for sample, key in zip(samples, self._keys(info), strict=True):
            with seeded_randomness(int(key)):
                one = partial(self._one, key)
                done.append(self._slab.with_picture(sample, one, self._slab.nest.sample))
        return done

    def _one(self, key: np.uint64, picture: Any) -> Any:
        if self._transform is not None:
            return self._transform(picture)
        assert self._batched is not None
        pixels = cast(torch.Tensor, as_tensor(picture))
        return self._batched(pixels[None], Draws(np.array([key], dtype=np.uint64)))[0]


def takes_draws(augment: Augmentation | Transform) -> bool:
    """Whether it is `augment(images, draws)` on a batch, and not `augment(image)` on each."""
    target = augment.forward if isinstance(augment, torch.nn.Module) else augment
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(target).parameters.values()
    wanted = [p for p in parameters if p.kind in kinds]
    return sum(p.default is p.empty or p.name == "draws" for p in wanted) >= 2
