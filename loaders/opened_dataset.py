"""A user's data set as a pipeline reads it: opened by its backend, its transform cut in two.

dataset (path or map-style) --backend--> map-style data set --split_dataset--> data set without
the random part of its transform, and that part; or, if all of it is in memory, its columns
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.adopting.adoption import decoded_columns, split_dataset
from loaders.adopting.transforms import TransformSplit
from loaders.arguments import check_dataset
from loaders.backends import open_source
from loaders.options import BatchOptions, CacheOptions, DecodingOptions
from loaders.slots.leaves import leaves_of, picture_number
from loaders.sources.randomness import seeded_randomness


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """Samples that lie decoded in memory, so that they need no slots."""

    columns: tuple[Any, ...]
    rows: NDArray[np.int64] | None
    """The row of each sample in the columns. None: sample i is row i."""


@dataclass(frozen=True, slots=True)
class OpenedDataset:
    """A data set that is ready to be read."""

    dataset: Any  # map-style: len() and [i]
    split: TransformSplit | None
    """The two parts of the data set's own transform, where the user gave no augmentation."""
    decoded: DecodedColumns | None


def open_dataset(
    dataset: Any, decoding: DecodingOptions, batches: BatchOptions, cache: CacheOptions
) -> OpenedDataset:
    dataset = open_source(dataset, decoding.backend)
    check_dataset(dataset)
    split = None
    if batches.augment is None and decoding.once is None:
        dataset, split = split_dataset(dataset)
        split = None if split is None else _for_its_pictures(split, dataset)
    if decoding.once is not None or cache.kind is not None or batches.collate is not None:
        return OpenedDataset(dataset, split, None)
    there = decoded_columns(dataset)
    return OpenedDataset(
        dataset, split, None if there is None else DecodedColumns(tuple(there[0]), there[1])
    )


def _for_its_pictures(split: TransformSplit, dataset: Any) -> TransformSplit:
    """The split for pictures as the data set's first sample has one."""
    if not split.rest:
        return split
    try:
        with seeded_randomness():  # torchvision's FakeData draws
            sample = dataset[0]
    except Exception:  # whoever needs this sample is told
        return split
    number = picture_number(sample)
    return split if number is None else split.seen(leaves_of(sample)[number])
