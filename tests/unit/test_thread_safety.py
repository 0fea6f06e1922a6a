"""Which data sets threads may read where a DataLoader had processes, and which go to processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loader_datasets import in_memory
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset
from torchvision import datasets, transforms

from loaders import ReuseLoader, Workers
from loaders.adopting.adoption import safe_in_threads
from loaders.backends import open_source
from loaders.sources.datasets import PictureArrays


class SharedFile:
    """All samples come out of one open file: seek, then read."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.seek(index)
        return torch.tensor(list(self.file.read(1)))


class Own:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class OwnStep:
    def __call__(self, picture: Any) -> Any:
        return picture


class OwnFolder(datasets.ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


ARRAYS = PictureArrays(np.zeros((8, 4, 4, 3), np.uint8), np.arange(8), ("a",))
TENSORS = TensorDataset(torch.zeros(8, 2))
TO_TENSOR = transforms.ToTensor()


def cifar(transform: Any = None) -> Any:
    return in_memory(datasets.CIFAR10, [0] * 8, transform)


@pytest.fixture
def folder(tmp_path: Path, make_pictures: Any) -> str:
    return str(make_pictures(tmp_path / "pictures", {"cat": 4, "dog": 4}))


@pytest.mark.parametrize(
    "dataset",
    [
        list(range(8)),
        np.zeros((8, 2)),
        ARRAYS,
        TENSORS,
        Subset(TENSORS, [1, 2]),
        ConcatDataset([ARRAYS, TENSORS]),
        StackDataset(a=ARRAYS, b=TENSORS),
        cifar(),
        cifar(TO_TENSOR),
        Subset(cifar(), [1]),
    ],
)
def test_what_lies_in_memory_is_safe(dataset: Any) -> None:
    assert safe_in_threads(dataset)


def test_folders_that_torchvision_or_we_read_are_safe(folder: str) -> None:
    assert safe_in_threads(datasets.ImageFolder(folder, TO_TENSOR))
    assert safe_in_threads(open_source(folder))


@pytest.mark.parametrize(
    "make",
    [
        lambda _: Own(),
        lambda _: Subset(Own(), [1]),
        lambda _: ConcatDataset([TENSORS, Own()]),
        lambda _: StackDataset(TENSORS, Own()),
        lambda _: datasets.FakeData(8),  # it seeds torch's own generator
        lambda root: OwnFolder(root),
        lambda root: datasets.ImageFolder(root, loader=np.load),
        lambda root: datasets.ImageFolder(root, transform=lambda p: p),
        lambda root: datasets.ImageFolder(root, transform=transforms.Lambda(OwnStep())),
        lambda root: datasets.ImageFolder(root, target_transform=str),
    ],
)
def test_what_runs_code_that_nobody_knows_is_not_known_to_be_safe(make: Any, folder: str) -> None:
    assert not safe_in_threads(make(folder))


# ---- from a DataLoader --------------------------------------------------------------------------


def adopted(dataset: Any, num_workers: int, **changes: Any) -> ReuseLoader:
    loader = DataLoader(dataset, 2, num_workers=1)
    loader.num_workers = num_workers  # without torch's advice on the number
    return ReuseLoader.from_dataloader(loader, **{"reuse": 1, **changes})


def kind(loader: ReuseLoader) -> tuple[str, int]:
    options = loader.setup.workers
    return options.kind, options.count


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_stay_processes_unless_threads_are_known_to_be_safe(
    workers: int, folder: str
) -> None:
    assert kind(adopted(Own(), workers)) == ("process", workers)
    assert kind(adopted(TENSORS, workers)) == ("thread", workers)
    own = transforms.Compose([transforms.Resize(8), OwnStep(), TO_TENSOR])
    pictures = datasets.ImageFolder(folder, own)
    assert kind(adopted(pictures, workers)) == ("thread", workers), "the own step is cut off"
    assert kind(adopted(pictures, workers, augment=OwnStep())) == ("process", workers)
    assert kind(adopted(Own(), workers, workers=Workers(kind="thread"))) == ("thread", workers)
    forked = adopted(Own(), workers, workers=Workers(start_method="fork"))
    assert kind(forked) == ("process", workers)


def test_what_cannot_be_sent_is_forked_or_read_by_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(8)))
    shared = SharedFile(tmp_path / "file")
    assert kind(adopted(shared, 2)) == ("process", 2)
    assert kind(adopted(shared, 0)) == ("thread", 0)
    assert kind(adopted(shared, 2, workers=Workers(kind="thread"))) == ("thread", 2)
    monkeypatch.setattr("loaders.options.default_start_method", lambda: "spawn")
    assert kind(adopted(shared, 2)) == ("thread", 1)
    shared.file.close()
