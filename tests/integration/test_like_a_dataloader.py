"""What other people's data sets give: the batches of a DataLoader, or a refusal by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from loaders import ReuseLoader


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal, their types too. (Words are a list, where torch may have a
    tuple of them.)"""
    if isinstance(one, list) and all(isinstance(word, str) for word in one):
        return one == list(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def batches(loader: Any) -> list[Any]:
    """What a pass gives; the type of the exception that ends it takes a batch's place."""
    found: list[Any] = []
    try:
        for batch in loader:
            found.append(batch)
    except Exception as error:
        found.append(type(error).__name__)
    return found


# ---- CIFAR-10 and MNIST, with other labels ------------------------------------------------------

COUNT = 7
LABELS = {
    "numbers": [3, 1, 2, 0, 9, 8, 7],
    "soft": [0.1 * n for n in range(COUNT)],
    "bools": [n % 2 == 0 for n in range(COUNT)],
    "one-hot": [[float(n == k) for k in range(3)] for n in range(COUNT)],
    "pairs": [(n, n / 2) for n in range(COUNT)],
    "dicts": [{"coarse": n, "fine": n / 2} for n in range(COUNT)],
    "words": [f"class {n}" for n in range(COUNT)],
    "int32": np.arange(COUNT, dtype=np.int32),
    "float32 rows": np.eye(COUNT, dtype=np.float32),
    "uint8 tensor": torch.arange(COUNT, dtype=torch.uint8),
    "float16 tensor": torch.linspace(0, 1, COUNT, dtype=torch.float16),
    "rows": torch.eye(COUNT),
    "numpy words": np.array(["a", "bc"] * 3 + ["d"]),
    "tensors": [torch.tensor(n / 2) for n in range(COUNT)],
}


def in_memory(kind: type, targets: Any) -> Any:
    """One of torchvision's data sets, without its files."""
    made = object.__new__(kind)
    shape = (COUNT, 32, 32, 3) if kind is datasets.CIFAR10 else (COUNT, 28, 28)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    made.data = pixels if kind is datasets.CIFAR10 else torch.from_numpy(pixels)
    made.targets, made.transform, made.target_transform = targets, v2.PILToTensor(), None
    made.transforms = None
    return made


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("kind", [datasets.CIFAR10, datasets.MNIST])
def test_labels_in_memory_keep_their_values_and_types(kind: type, labels: str) -> None:
    dataset = in_memory(kind, [0] * COUNT)
    theirs = DataLoader(dataset, 3)
    with ReuseLoader.from_dataloader(theirs, reuse=1) as loader:
        assert same(list(loader), list(theirs))
        dataset.targets = LABELS[labels]
        expected, served = batches(theirs), batches(loader)
    if isinstance(expected[-1], str):
        assert isinstance(served[-1], str)  # torch refuses them as well
    else:
        assert same(served, expected)
