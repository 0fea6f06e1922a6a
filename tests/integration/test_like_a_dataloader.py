"""What other people's data sets give: the batches of a DataLoader, or a refusal by name."""

from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from loaders import ReuseLoader, Workers
from loaders.errors import SampleShapeError


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
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
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


# ---- samples of odd classes ---------------------------------------------------------------------


class Degree(IntEnum):
    LOW = 0
    HIGH = 1


class OwnDict(dict[str, Any]):
    """As libraries return it."""


class OwnFloat(float):
    """As libraries return it."""


SAMPLES: dict[str, Callable[[int], Any]] = {
    "UserDict": lambda n: UserDict(z=torch.full((2,), n), a=n / 2),
    "dict": lambda n: (OwnDict(x=n), n),
    "OrderedDict": lambda n: OrderedDict(z=n, a=n + 0.5),
    "defaultdict": lambda n: defaultdict(int, a=n),
    "IntEnum": lambda n: (torch.ones(2), Degree(n % 2)),
    "float": lambda n: [OwnFloat(n)],
    "UserList": lambda n: UserList([n, n + 1]),
    "deque": lambda n: deque([n, n / 2]),
    "range": lambda n: range(n, n + 3),
    "float8": lambda n: torch.full((3,), n).to(torch.float8_e4m3fn),
    "conjugate": lambda n: torch.full((2,), 1j * n).conj(),
    "negative": lambda n: torch.full((2,), 1j * n).conj().imag,
}
REFUSED: dict[str, Callable[[int], Any]] = {
    "PackedSequence": lambda n: pack_sequence([torch.ones(3)]),
    "sparse_coo": lambda n: (n, torch.eye(3).to_sparse()),
    "requires_grad": lambda n: torch.ones(3, requires_grad=True) * n,
    "meta": lambda n: torch.ones(3, device="meta"),
}


class Made:
    """Samples that a function makes of their numbers."""

    def __init__(self, made: Callable[[int], Any]) -> None:
        self._made = made

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self._made(index)


def adopted(made: Callable[[int], Any]) -> tuple[DataLoader[Any], ReuseLoader]:
    theirs = DataLoader(Made(made), 3)  # pyright: ignore[reportArgumentType]
    reading: Any = {"workers": Workers(1, "thread")}
    return theirs, ReuseLoader.from_dataloader(theirs, reuse=1, **reading)


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_of_odd_classes_make_torchs_batches(kind: str) -> None:
    theirs, loader = adopted(SAMPLES[kind])
    with loader:
        assert same(list(loader), list(theirs))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_buffer_keeps_is_refused_by_its_name(kind: str) -> None:
    said = f"{kind}.*let the data set return"
    with adopted(REFUSED[kind])[1] as loader, pytest.raises(SampleShapeError, match=said):
        next(iter(loader))
