"""Data sets with transforms, and data sets in memory, against torchvision's own reading of them."""

import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
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
from loaders.adopting.transforms import PerSample
from loaders.pixels.augmentation import Chain, Flip, PadCrop
from loaders.pixels.color import ToFloat
from loaders.sources.datasets import PictureArrays

TEN: Any = list(range(10))


def fake(transform: Any = None, size: int = 8, **options: Any) -> datasets.FakeData:
    return datasets.FakeData(6, (3, size, size), 3, transform, **options)


ROW = transforms.Compose(
    [transforms.Resize((8, 8)), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


def test_a_torchvision_data_set_is_copied_with_what_is_cached_of_its_transform() -> None:
    mine = fake(ROW, size=10)
    before = dict(vars(mine))
    made, split = split_dataset(mine)
    assert split is not None
    assert made is not mine
    assert type(made) is datasets.FakeData
    assert vars(mine) == before
    assert mine.transform is ROW
    assert mine.transforms is not None
    assert mine.transforms.transform is ROW
    assert split.augment == Chain((Flip(0.5), ToFloat()))
    picture, label = made[3]
    plain, same_label = fake(transforms.Resize((8, 8)), size=10)[3]
    assert isinstance(picture, Image.Image)
    assert np.array_equal(np.asarray(picture), np.asarray(plain))
    assert label == same_label


def test_what_a_data_set_knows_of_its_pictures_size_makes_a_crop_a_shift() -> None:
    crop = transforms.RandomCrop(8, padding=1)
    _, split = split_dataset(fake(crop))
    assert split is not None
    assert split.augment == Chain((PadCrop(1),))
    _, split = split_dataset(fake(crop, size=9))
    assert split is not None
    assert not split.batched


def test_a_target_transform_stays_where_it_is() -> None:
    made, _ = split_dataset(fake(ROW, target_transform=lambda label: label + 100))
    assert made[0][1] >= 100


def test_an_image_folder_is_split_too(tmp_path: Path, make_pictures: Any) -> None:
    root = make_pictures(tmp_path / "p", {"cat": 2, "dog": 1})
    made, split = split_dataset(datasets.ImageFolder(str(root), ROW))
    assert split is not None
    assert [label for _, label in (made[n] for n in range(3))] == [0, 0, 1]
    assert made[0][0].size == (8, 8)
    assert made[0][0].mode == "RGB"


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


def test_a_split_data_set_can_go_to_another_process() -> None:
    made, split = split_dataset(fake(ROW))
    again, split_again = pickle.loads(pickle.dumps((made, split)))
    assert np.array_equal(np.asarray(again[2][0]), np.asarray(made[2][0]))
    assert split_again.report == cast(Any, split).report


# ---- samples in memory --------------------------------------------------------------------------


def cifar(kind: type = datasets.CIFAR10, transform: Any = None, **options: Any) -> Any:
    """Without its files."""
    made = object.__new__(kind)
    rng = np.random.default_rng(0)
    made.data = rng.integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
    made.targets = [3, 1, 2, 0, 9, 8, 7]
    made.transform, made.target_transform, made.transforms = transform, None, None
    vars(made).update(options)
    return made


def mnist() -> Any:
    made = object.__new__(datasets.FashionMNIST)
    made.data = torch.randint(0, 256, (5, 28, 28), dtype=torch.uint8)
    made.targets = torch.arange(5)
    made.transform = made.target_transform = made.transforms = None
    return made


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


def test_columns_are_no_copies_even_of_a_file_that_may_only_be_read(tmp_path: Path) -> None:
    data = arrays()
    columns, _ = cast(Any, decoded_columns(data))
    data.pixels[2, 1, 3, 0] = 77
    assert columns[0][2, 0, 1, 3] == 77
    np.save(tmp_path / "pixels.npy", data.pixels)
    mapped = np.load(tmp_path / "pixels.npy", mmap_mode="r")
    columns, _ = cast(Any, decoded_columns(PictureArrays(mapped, data.labels, ("a", "b"))))
    assert columns[0][2, 0, 1, 3] == 77


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


def test_cifar_with_the_usual_transform_is_in_memory_once_it_was_split() -> None:
    usual = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.ToImage()])
    made, split = split_dataset(Subset(cifar(transform=usual), [2, 3]))
    assert decoded_columns(made) is not None
    assert cast(Any, split).augment == Chain((PadCrop(4), Flip(0.5)))
    _, rotated = split_dataset(cifar(transform=v2.RandomRotation(3)))
    assert cast(PerSample, cast(Any, rotated).augment).form == "picture"
