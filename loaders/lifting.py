"""A data set without its own random transform, where that is proven to change no sample."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

from loaders.adopting.own_transforms import (
    LIFTED,
    Lift,
    ReadBothWays,
    advice,
    lifted,
    possible_lifts,
)
from loaders.adopting.probing import SECONDS, schedule
from loaders.adopting.transforms import TransformSplit
from loaders.errors import WorkerDied
from loaders.opened_dataset import OpenedDataset
from loaders.options import LoaderOptions
from loaders.pixels.augmentation import Chain
from loaders.slots.leaves import Chunk
from loaders.user_views import WholeSample

Reading = Callable[[Any], AbstractContextManager[Callable[[Sequence[int]], Chunk]]]
"""Lends a function that reads samples of a data set, wherever samples are read."""


def without_transform(
    opened: OpenedDataset,
    options: LoaderOptions,
    reading: Reading,
    varies: Callable[[Any], str | None],
) -> OpenedDataset | str:
    """The data set whose random transform is redone at every serve; or why it is not. `varies` says
    in what reading a data set varies."""
    dataset = opened.dataset
    for lift in possible_lifts(dataset):
        found = _proven(dataset, lift, reading)
        if isinstance(found, Lift):
            lift, taken = found, lifted(dataset, found)
            found = "what [i] does beside it is random" if varies(taken) else ""
            if not found and lift.name in LIFTED:
                ours = None if options.collate else lift.batched()
                augment = WholeSample(lift) if ours is None else Chain(ours)
                split = TransformSplit(None, augment, ours is not None, lift.report)
                return replace(opened, dataset=taken, split=split)
        if lift.name in LIFTED or not found:
            cannot = f" cannot be redone apart from the rest of [i] ({found})" if found else " is"
            return f"its .{lift.name}{cannot}: {advice(lift.name)}"
    return ""


def _proven(dataset: Any, lift: Lift, reading: Reading) -> Lift | str:
    """The lift with what samples tell of it, or why it would change one."""
    found: Lift | None = None
    until = time.monotonic() + SECONDS
    try:
        with reading(ReadBothWays(dataset, lift)) as read:
            for sample_id in dict.fromkeys(schedule(len(dataset))):
                if found is not None and time.monotonic() > until:
                    break
                chunk = read([sample_id])
                if isinstance(chunk.error, Exception):
                    continue  # a pass tells of what it cannot read
                if chunk.error is not None:
                    raise chunk.error
                told = cast(Any, chunk.samples[0])
                if isinstance(told, str):
                    return f"sample {sample_id}: {told}"
                before, found = found, replace(lift, ways=told[0], form=told[1])
                if before not in (None, found):
                    return f"sample {sample_id}: it is given something else than for others"
    except WorkerDied as error:
        return str(error)
    return found or "none of the samples that were tried could be read"
