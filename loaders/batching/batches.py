"""From the slots of a batch to the batch: samples are gathered, augmented and put together.

    on a worker's thread           slots -> pictures augmented straight out of them, rest gathered
    on the consumer's own thread   a user's one-argument transform, a user's collate function

Augmentations of ours draw from their `draws` alone, so they run on a worker also where single
samples are wanted. A user's own code does not (`user_views`).
"""

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.batching.joint_parts import JointPart, is_ours
from loaders.batching.serve_views import DeviceViews, ServedSlots, SlotViews
from loaders.batching.user_views import SeededFunction, Transform, UserViews, WholeSample
from loaders.blocks import Blocks
from loaders.errors import LoaderError
from loaders.pixels.augmentation import Augmentation, Cropping
from loaders.slots.slab import Slab
from loaders.stats import BatchInfo
from loaders.workers.worker_pool import ChangeCrew

# A batch is nested as the user's samples are: only its leaves have types here.
Batch = Any
Collate = Callable[[list[Any]], Batch]
Augment = Augmentation | Transform
Augments = Augment | Sequence[Augment]
"""What makes the only view of a serve, or a list with what makes each of several."""


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
    batch: Batch = None
    """The batch, where nothing is left to be done."""


PartsOf = Callable[[Any], Sequence[JointPart]]
"""Which parts of samples like one go with its picture."""


class BatchMaker:
    """Makes batches of the samples in one slab."""

    def __init__(
        self,
        slab: Slab,
        augment: Augments | None,
        collate: Collate | None,
        keys: Callable[[BatchInfo], NDArray[np.uint64]],
        blocks: Blocks,
        on_device: bool = False,
        parts_of: PartsOf = lambda _: (),
        crew: ChangeCrew | None = None,
    ) -> None:
        """`keys(info)`: the keys of a batch's samples, for random numbers. `on_device`: whether the
        training device augments. `parts_of` says what goes with a picture. With a `crew`, a user's
        own code runs in its processes."""
        augments = each_view(augment)
        whole = any(isinstance(each, WholeSample) for each in augments)
        if augments and slab.picture is None and not whole:
            raise LoaderError(
                "augment was given, but no part of a sample has two dimensions or more, so there is"
                " no picture to augment: leave augment out"
            )
        batched = [has_draws_parameter(each) for each in augments]
        parts = parts_of(slab.nest.template)
        if on_device:
            _check_on_device(augment, collate, all(batched), parts)
        several = isinstance(augment, list | tuple)
        single = collate is not None or slab.needs_torch_collate or not all(batched)
        self._on_device = self._slot_views = self._user_views = None
        if augments and on_device:
            self._on_device = DeviceViews(cast(Sequence[Augmentation], augments), several)
        elif augments and (not single or all(map(is_ours, augments))):
            ours = cast(Sequence[Augmentation], augments)
            self._slot_views = SlotViews(ours, several, parts, blocks)
        elif augments:
            self._user_views = UserViews(augments, batched, several)
        self._changed = None
        if self._user_views is not None and crew is not None:
            pickled = self._user_views.pickled()
            self._changed = partial(crew.changed, pickled) if pickled else None
        self.slab = slab
        self._parts_of = parts_of
        self._collate = None if collate is None else SeededFunction(collate)
        self._in_columns = not single
        """Whether a worker makes whole columns, because no code needs single samples."""
        self._keys = keys
        self._blocks = blocks

    @property
    def first_steps(self) -> list[Cropping] | None:
        """Which box of a picture each view of a serve shows. None: all of it may be seen."""
        views = self._slot_views if self._in_columns else None
        return None if views is None else views.first_steps

    def for_slab(self, slab: Slab) -> "BatchMaker":
        """The same for samples of the same kind in another slab."""
        other = copy.copy(self)
        other.slab = slab
        return other

    def make(
        self, info: BatchInfo, slots: NDArray[np.int64], serves: NDArray[np.int64]
    ) -> Gathered:
        """Make as much of a batch as a worker's thread may. `serves` are those that are drawn."""
        started, slab, views = time.perf_counter(), self.slab, self._slot_views
        columns = samples = batch = None
        if self._in_columns:
            keys = self._keys(info)
            served = ServedSlots(slab, slots, keys, info.ids, serves)
            made = views.columns(served) if views else {}
            columns = [
                made[number] if number in made else column.gather(slots, self._blocks)
                for number, column in enumerate(slab.columns)
            ]
        else:
            samples = [slab.sample(slot) for slot in slots.tolist()]
            if views:
                samples = self._by_ours(views, samples, slots, info)
            if self._changed is not None:
                samples = self._by_user(samples, info)
                if self._collate is None:
                    samples, batch = None, torch.utils.data.default_collate(samples)
        return Gathered(info, time.perf_counter() - started, columns, samples, batch)

    def finish(self, gathered: Gathered) -> Batch:
        """Make the rest of a batch on the consumer's thread."""
        if gathered.columns is not None:
            return self.slab.nest.batch(gathered.columns)
        if gathered.samples is None:
            return gathered.batch
        samples, info = gathered.samples, gathered.info
        if self._changed is None:
            samples = self._by_user(samples, info)
        if self._collate is None:
            return torch.utils.data.default_collate(samples)
        return self._collate(samples, int(self._keys(info)[0]))

    def _by_ours(
        self, views: SlotViews, samples: list[Any], slots: NDArray[np.int64], info: BatchInfo
    ) -> list[Any]:
        """The samples, augmented out of the slots. One without a picture stays as it is."""
        keys, ids, odd = self._keys(info), info.ids, self.slab.unlike(slots)
        rest = [n for n in range(len(slots)) if n not in odd]
        if rest:
            plain = [samples[n] for n in rest]
            made = views.samples(plain, ServedSlots(self.slab, slots, keys, ids).only(rest))
            for n, sample in zip(rest, made, strict=True):
                samples[n] = sample
        first = np.zeros(1, dtype=np.int64)
        for n, slab in odd.items():
            if slab.picture is None:
                continue
            try:
                alike = views.going_with(self._parts_of(slab.nest.template))
            except LoaderError as error:
                error.add_note(f"in sample {ids[n]}, which has other parts than the first one")
                raise
            at = slice(n, n + 1)
            served = ServedSlots(slab, first, keys[at], ids[at])
            [samples[n]] = alike.samples(samples[at], served)
        return samples

    def _by_user(self, samples: list[Any], info: BatchInfo) -> list[Any]:
        """The samples, augmented by a user's own code, if there is some."""
        if (views := self._user_views) is None:
            return samples
        keys, ids = self._keys(info).tolist(), info.ids.tolist()
        return views.samples(samples, self.slab, keys, ids, self._changed)

    def augmented_on_device(self, info: BatchInfo, batch: Batch) -> Batch:
        """Augment a batch on the training device, where that was asked for."""
        if (views := self._on_device) is None:
            return batch
        keys, nest = self._keys(info), self.slab.nest
        return self.slab.with_picture(batch, lambda images: views(images, keys), nest.batch)


def each_view(augment: Augments | None) -> Sequence[Augment]:
    """What makes each view of a serve. Empty: nothing is done at a serve."""
    if isinstance(augment, list | tuple):
        return augment
    return [] if augment is None else [cast(Augment, augment)]


def _check_on_device(
    augment: object, collate: object, batched: bool, parts: Sequence[JointPart]
) -> None:
    if augment is not None and not (batched and collate is None):
        raise ValueError(
            f"Device(augments=True) needs an augment(images, draws) on batches, and no collate"
            f" function; augment is {augment!r}, collate is {collate!r}"
        )
    if parts:
        raise ValueError(
            f"Device(augments=True) would move the pictures alone, and part {parts[0].place} goes"
            " with them: leave augments out"
        )


def has_draws_parameter(augment: Augment) -> bool:
    """Whether `augment` is a function (images, draws) of a batch, and not one of a single image."""
    target = augment.forward if isinstance(augment, torch.nn.Module) else augment
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(target).parameters.values()
    wanted = [p for p in parameters if p.kind in kinds]
    return sum(p.default is p.empty or p.name == "draws" for p in wanted) >= 2
