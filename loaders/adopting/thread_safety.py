"""Whether several threads may read a data set at once.

A DataLoader reads in processes, so that each has file handles, positions and caches of its own. Our
threads share them: one moves to its sample in an open file, another reads there. So only data sets
whose reading is known to share nothing are read by threads where a DataLoader had processes.
"""

import pickle
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from loaders.adopting.torchvision_steps import SAFE_IN_THREADS, torchvision_name, torchvision_reader
from loaders.adopting.transforms import Decode, flat_steps

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
        pickle.Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(dataset)
    except Exception as error:
        return str(error)
    return ""


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes  # a large array comes as a PickleBuffer


def _is_safe_step(step: Any) -> bool:
    if isinstance(step, Decode):
        return all(map(_is_safe_step, step.steps))
    name = torchvision_name(step)
    return name is not None and name not in CALLS_OTHERS
