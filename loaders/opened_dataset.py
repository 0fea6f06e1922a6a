"""A user's data set as a pipeline reads it: opened by its backend, its transform cut in two.

dataset (path or map-style) --backend--> map-style data set --split_dataset--> data set without
the random part of its transform, and that part; or, if all of it is in memory, its columns
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.adopting.adoption import decoded_columns, split_dataset
from loaders.adopting.transforms import TransformSplit
from loaders.arguments import check_dataset
from loaders.backends import open_source
from loaders.options import BatchOptions, CacheOptions, DecodingOptions

log = logging.getLogger(__name__)


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
        if split is not None and split.decode is None and split.augment is None:
            log.warning("%s", split.report)
    if decoding.once is not None or cache.kind is not None or batches.collate is not None:
        return OpenedDataset(dataset, split, None)
    there = decoded_columns(dataset)
    return OpenedDataset(
        dataset, split, None if there is None else DecodedColumns(tuple(there[0]), there[1])
    )
