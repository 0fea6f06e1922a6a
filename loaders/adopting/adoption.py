"""A user's data set or arrays in memory, and what is read from them.

    data set    --split_dataset---->  one with the cached part of its transform, and the rest
    data set    --decoded_columns-->  its columns, if it is decoded in memory

Nothing here changes its arguments.
"""

import copy
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from loaders.adopting.torchvision_steps import (
    NOT_ONE_PICTURE,
    READ_TRANSFORMS,
    SAFE_IN_THREADS,
    is_from,
    known_size,
    torchvision_name,
    torchvision_reader,
)
from loaders.adopting.transforms import Decode, TransformSplit, flat_steps, split_transform
from loaders.sources.datasets import PictureArrays

# Map-style: len() and [i]; torch's Dataset does not promise len().
DataSet = Any


def split_dataset(dataset: DataSet) -> tuple[DataSet, TransformSplit | None]:
    """The data set, or a copy of it that applies only the cached part of its transform; and the
    split of the transform (None: it has none, or its own code applies it, in [i])."""
    if type(dataset) is Subset:
        inner, split = split_dataset(dataset.dataset)
        if inner is not dataset.dataset:
            dataset = copy.copy(dataset)
            dataset.dataset = inner
        return dataset, split
    whole = _split_parts(dataset)
    if whole is not None:
        return whole
    owner = torchvision_reader(dataset)
    both = getattr(dataset, "transforms", None)
    joint = both is not None and not is_from(both, "torchvision.datasets.vision")
    if owner is None or owner in NOT_ONE_PICTURE or joint:
        return dataset, None  # if it is random, `own_transforms` looks at what [i] does with it
    transform = getattr(both, "transform", None) if owner in READ_TRANSFORMS else dataset.transform
    if transform is None:
        return dataset, None
    split = split_transform(transform, known_size(dataset, owner))
    made = copy.copy(dataset)
    made.transform = split.decode
    if both is not None:
        made.transforms = copy.copy(both)
        made.transforms.transform = split.decode
    return made, split


def _split_parts(dataset: DataSet) -> tuple[DataSet, TransformSplit] | None:
    """A ConcatDataset with its parts split, if what is redone is the same for all of them."""
    if type(dataset) is not ConcatDataset:
        return None
    made, splits = zip(*map(split_dataset, dataset.datasets), strict=True)
    first = splits[0]
    for split in splits:
        if split is None or (split.size, split.augment) != (first.size, first.augment):
            return None
        same_steps = [*map(id, split.rest)] == [*map(id, first.rest)]
        if not same_steps and not (split.batched and first.batched):
            return None
    whole = copy.copy(dataset)
    whole.datasets = list(made)
    return whole, first


def decoded_columns(
    dataset: DataSet,
) -> tuple[list[torch.Tensor], NDArray[np.int64] | None] | None:
    """The columns of a data set that is decoded in memory (views; [N, C, H, W] for pictures), and
    the rows of its samples in them (None: row i is sample i). Returns None if it must be read."""
    if type(dataset) is Subset:
        inner = decoded_columns(dataset.dataset)
        if inner is None:
            return None
        columns, rows = inner
        ids = np.asarray(dataset.indices, dtype=np.int64)
        if rows is None:
            return columns, np.where(ids < 0, ids + len(columns[0]), ids)
        return columns, rows[ids]
    if type(dataset) is PictureArrays:
        return [_view(dataset.pixels).permute(0, 3, 1, 2), _view(dataset.labels)], None
    if type(dataset) is TensorDataset:
        return list(dataset.tensors), None
    owner = torchvision_reader(dataset)
    if owner not in ("CIFAR10", "MNIST") or dataset.target_transform is not None:
        return None
    decode = dataset.transform
    if decode is not None and not (isinstance(decode, Decode) and decode.keeps_pixels):
        return None
    labels, pixels = _column(dataset.targets), _column(dataset.data)
    dimensions = 3 if owner == "MNIST" else 4
    if labels is None or pixels is None or pixels.dtype != torch.uint8:
        return None
    if pixels.ndim != dimensions or len(labels) != len(pixels):
        return None
    if owner == "CIFAR10":
        return [pixels.permute(0, 3, 1, 2), labels], None
    # MNIST's [i] returns int(label).
    whole = labels.ndim == 1 and not labels.is_floating_point() and not labels.is_complex()
    return ([pixels[:, None], labels.long()], None) if whole else None


def _column(values: Any) -> torch.Tensor | None:
    """The values of all samples, as torch's default_collate would batch them. None: they must be
    read sample by sample."""
    if isinstance(values, list):
        kinds = {*map(type, values)}
        return default_collate(values) if kinds in ({int}, {float}, {bool}) else None
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        return _view(values)
    return values if type(values) is torch.Tensor else None


def _view(array: NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():  # a file may be mapped for reading; nobody writes to it
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


IN_MEMORY = (list, tuple, range, np.ndarray, torch.Tensor, TensorDataset)
CALLS_OTHERS = frozenset({"Lambda", "RandomApply", "RandomChoice", "RandomOrder"})
"""Transforms of torchvision that call functions of the user's."""


def safe_in_threads(dataset: Any) -> bool:
    """Whether reading `dataset` from several threads is known to be safe."""
    kind = type(dataset)
    if kind is Subset:
        return safe_in_threads(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(safe_in_threads, dataset.datasets))
    if kind is StackDataset:
        inside = dataset.datasets
        return all(map(safe_in_threads, inside.values() if isinstance(inside, dict) else inside))
    if kind in IN_MEMORY or kind.__module__.startswith("loaders."):
        return True
    if torchvision_reader(dataset) not in SAFE_IN_THREADS:
        return False
    opens = getattr(dataset, "loader", None)  # what a DatasetFolder opens its files with
    return (
        dataset.target_transform is None
        and (opens is None or getattr(opens, "__module__", "") == "torchvision.datasets.folder")
        and all(map(_is_safe_step, flat_steps(dataset.transform)))
    )


def why_not_sendable(dataset: Any) -> str:
    """Why a data set cannot be pickled for another process. Empty: it can."""
    try:
        with Path(os.devnull).open("wb") as nowhere:
            pickle.Pickler(nowhere, protocol=pickle.HIGHEST_PROTOCOL).dump(dataset)
    except Exception as error:
        return str(error)
    return ""


def _is_safe_step(step: Any) -> bool:
    if isinstance(step, Decode):
        return all(map(_is_safe_step, step.steps))
    name = torchvision_name(step)
    return name is not None and name not in CALLS_OTHERS
