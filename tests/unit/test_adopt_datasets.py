"""Data sets with transforms, and data sets in memory, against torchvision's own reading of them."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from support.loader_datasets import in_memory
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    Subset,
    TensorDataset,
    random_split,
)
from torchvision import datasets, transforms
from torchvision.transforms import v2

from loaders.adopting.adoption import decoded_columns, split_dataset
from loaders.sources.datasets import PictureArrays

TEN: Any = list(range(10))


def fake(transform: Any = None, size: int = 8, **options: Any) -> datasets.FakeData:
    return datasets.FakeData(6, (3, size, size), 3, transform, **options)


ROW = transforms.Compose(
    [transforms.Resize((8, 8)), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


def test_a_target_transform_stays_where_it_is() -> None:
    made, _ = split_dataset(fake(ROW, target_transform=lambda label: label + 100))
    assert made[0][1] >= 100


def test_subsets_of_subsets_are_copied_down_to_the_data_set() -> None:
    mine = fake(ROW)
    inner = Subset(mine, [4, 3, 2, 1])
    outer, _ = random_split(Subset(inner, [0, 2]), [1, 1])
    made, split = split_dataset(outer)
    assert split is not None
    assert split.batched
    assert made is not outer
    assert made.indices is outer.indices
    assert inner.dataset is mine
    assert mine.transform is ROW
    original, _ = outer[0]
    assert torch.equal(transforms.ToTensor()(made[0][0]), original) or torch.equal(
        transforms.ToTensor()(made[0][0]).flip(-1), original
    )


def test_a_transform_of_picture_and_target_that_torchvision_made_of_one_is_split(
    tmp_path: Path,
) -> None:
    class Pictures(datasets.VisionDataset):
        pass

    # Places365 and its like read .transforms, others .transform.
    Pictures.__getitem__ = datasets.Places365.__getitem__
    Pictures.__len__ = lambda self: 1
    Image.new("RGB", (9, 9), (10, 20, 30)).save(tmp_path / "p.png")
    mine = cast(Any, Pictures(str(tmp_path), transform=ROW))
    mine.imgs = [(str(tmp_path / "p.png"), 7)]
    mine.loader = datasets.folder.default_loader
    made, split = split_dataset(mine)
    assert split is not None
    assert split.batched
    picture, label = made[0]
    assert picture.size == (8, 8)
    assert label == 7
    assert torch.is_tensor(mine[0][0]), "the user's own is as it was"


class OwnPictures(Dataset[Any]):
    def __init__(self, transform: Any = None, transforms: Any = None) -> None:
        self.transform = transform
        self.transforms = transforms

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return index


PAIRS: Any = object.__new__(datasets.LFWPairs)
PAIRS.transform, PAIRS.transforms = ROW, None
JOINT = fake()
JOINT.transforms = v2.Compose([v2.RandomHorizontalFlip()])


@pytest.mark.parametrize(
    "dataset",
    [
        fake(),
        TEN,
        OwnPictures(),
        Subset(TEN, [1]),
        TensorDataset(torch.zeros(3)),
        OwnPictures(ROW),
        ConcatDataset([OwnPictures(), fake(ROW)]),
        PAIRS,
        JOINT,
    ],
    ids=["none", "list", "own", "subset", "tensors", "own row", "concat", "pairs", "joint"],
)
def test_a_data_set_without_a_transform_of_pictures_alone_is_what_it_was(dataset: Any) -> None:
    same, split = split_dataset(dataset)
    assert same is dataset
    assert split is None


# ---- samples in memory --------------------------------------------------------------------------


def cifar(kind: type = datasets.CIFAR10, transform: Any = None, **options: Any) -> Any:
    made = in_memory(kind, [3, 1, 2, 0, 9, 8, 7], transform)
    vars(made).update(options)
    return made


def mnist() -> Any:
    return in_memory(datasets.FashionMNIST, torch.arange(5))


def arrays() -> PictureArrays:
    pixels = np.random.default_rng(1).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    return PictureArrays(pixels, np.arange(6), ("a", "b"))


def as_tensor(value: Any) -> torch.Tensor:
    return (
        transforms.PILToTensor()(value)
        if isinstance(value, Image.Image)
        else torch.as_tensor(value)
    )


@pytest.mark.parametrize(
    "dataset",
    [
        cifar(),
        cifar(datasets.CIFAR100),
        cifar(transform=split_dataset(cifar(transform=v2.ToImage()))[0].transform),
        mnist(),
        arrays(),
        TensorDataset(torch.rand(5, 3, 2, 2), torch.arange(5), torch.rand(5)),
        Subset(arrays(), [4, -1, 0]),
        Subset(Subset(cifar(), [6, 5, -7, 1]), [3, -2]),
    ],
    ids=["cifar10", "cifar100", "to image", "mnist", "arrays", "tensors", "subset", "nested"],
)
def test_columns_in_memory_hold_what_the_data_set_gives(dataset: Any) -> None:
    found = decoded_columns(dataset)
    assert found is not None
    columns, ids = found
    for n in range(len(dataset)):
        row = n if ids is None else int(ids[n])
        assert row >= 0
        for column, value in zip(columns, dataset[n], strict=True):
            assert torch.equal(column[row], as_tensor(value).as_subclass(torch.Tensor))
            assert column.dtype == as_tensor(value).dtype


@pytest.mark.parametrize(
    "dataset",
    [
        TEN,
        fake(),
        OwnPictures(),
        cifar(transform=ROW),
        cifar(target_transform=str),
        Subset(cifar(transform=ROW), [1]),
        split_dataset(cifar(transform=ROW))[0],
    ],
)
def test_what_has_to_be_read_or_transformed_is_not_in_memory(dataset: Any) -> None:
    assert decoded_columns(dataset) is None
