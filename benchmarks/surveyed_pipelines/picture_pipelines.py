"""Classification: a picture and its class."""

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torchvision import datasets, transforms
from torchvision.transforms import v2

from surveyed_pipelines.made_up_data import pixels, write_classes, write_pictures
from surveyed_pipelines.pipeline_case import BATCH, COUNT, SIDE, Pipeline, each_picture, library

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def imagenet_v1(random: bool) -> Callable[[Any], Any]:
    moved = (
        [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip()]
        if random
        else [transforms.Resize(SIDE + 4), transforms.CenterCrop(SIDE)]
    )
    floats = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    return transforms.Compose([*moved, *floats])


def folder_of(folder: Path, transform: Callable[[Any], Any] | None) -> datasets.ImageFolder:
    return datasets.ImageFolder(str(folder / "train"), transform)


def image_folder(folder: Path, random: bool) -> DataLoader[Any]:
    return DataLoader(
        folder_of(folder, imagenet_v1(random)), BATCH, shuffle=True, num_workers=2, pin_memory=True
    )


def weighted(folder: Path, random: bool) -> DataLoader[Any]:
    dataset = folder_of(folder, imagenet_v1(random))
    weights = [1.0 + number % 3 for number in dataset.targets]
    sampler = WeightedRandomSampler(weights, len(dataset), replacement=True)
    return DataLoader(dataset, BATCH, sampler=sampler, num_workers=2)


# ---- the references' v2 recipe: MixUp and CutMix in the collate function -------------------------


class Mixed:
    """MixUp or CutMix over a batch, as torchvision's references do it."""

    def __init__(self, random: bool) -> None:
        choices = [v2.MixUp(num_classes=COUNT), v2.CutMix(num_classes=COUNT)]
        self.mix = v2.RandomChoice(choices) if random else None

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return batch if self.mix is None else self.mix(*batch)


def reference_v2(folder: Path, random: bool) -> DataLoader[Any]:
    moved = (
        [v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip(0.5),
         v2.TrivialAugmentWide()]
        if random
        else [v2.Resize(SIDE, antialias=True), v2.CenterCrop(SIDE)]
    )  # fmt: skip
    floats = [v2.PILToTensor(), v2.ToDtype(torch.float, scale=True), v2.Normalize(MEAN, STD)]
    erased = [v2.RandomErasing(0.1), v2.ToPureTensor()] if random else [v2.ToPureTensor()]
    dataset = folder_of(folder, v2.Compose([*moved, *floats, *erased]))
    return DataLoader(
        dataset, BATCH, shuffle=True, num_workers=2, pin_memory=True, collate_fn=Mixed(random)
    )


def mixed_ids(batch: Any) -> list[int]:
    """A mixed batch has as much of every class as the batch that it was mixed from."""
    if batch[1].ndim == 1:
        return batch[1].tolist()
    counts = batch[1].double().sum(0).round().long().tolist()
    return [number for number, times in enumerate(counts) for _ in range(times)]


# ---- CIFAR-10, MNIST -----------------------------------------------------------------------------


def write_cifar(folder: Path) -> None:
    inside = folder / "cifar-10-batches-py"
    inside.mkdir()
    parts = np.array_split(np.arange(COUNT), len(datasets.CIFAR10.train_list))
    for (name, _), numbers in zip(datasets.CIFAR10.train_list, parts, strict=True):
        rows = [pixels(int(n), 32, 32).transpose(2, 0, 1).reshape(-1) for n in numbers]
        told = {"data": np.stack(rows), "labels": numbers.tolist()}
        (inside / name).write_bytes(pickle.dumps(told))
    names = {"label_names": [f"class {number}" for number in range(COUNT)]}
    (inside / "batches.meta").write_bytes(pickle.dumps(names))


def cifar(folder: Path, random: bool) -> DataLoader[Any]:
    moved = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    floats = [transforms.ToTensor(), transforms.Normalize((0.49, 0.48, 0.45), (0.2, 0.2, 0.2))]
    chain = transforms.Compose([*(moved if random else []), *floats])
    with (
        mock.patch.object(datasets.CIFAR10, "_check_integrity", lambda _self: True),
        mock.patch("torchvision.datasets.cifar.check_integrity", lambda *_: True),
    ):
        dataset = datasets.CIFAR10(str(folder), train=True, transform=chain)
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=2)


def write_mnist(folder: Path) -> None:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in "train", "t10k":
        pictures = np.stack([pixels(n, 28, 28)[..., 0] for n in range(COUNT + 6)])
        head = np.array([2051, len(pictures), 28, 28], ">i4").tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + pictures.tobytes())
        labels = np.arange(len(pictures), dtype=np.uint8)
        head = np.array([2049, len(labels)], ">i4").tobytes()
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def mnist(folder: Path, _random: bool) -> DataLoader[Any]:
    chain = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.13,), (0.31,))])
    whole = datasets.MNIST(str(folder), train=True, transform=chain)
    train, _ = random_split(whole, [COUNT, 6], generator=torch.Generator().manual_seed(42))
    return DataLoader(train, BATCH, shuffle=True, num_workers=1)


# ---- the transform around a split ----------------------------------------------------------------


class Transformed(Dataset[Any]):
    """The part of a split with a transform of its own, as forums advise it."""

    def __init__(self, subset: Any, transform: Callable[[Any], Any] | None) -> None:
        self.subset = subset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.subset)

    def __getitem__(self, index: int) -> Any:
        x, y = self.subset[index]
        return (x if self.transform is None else self.transform(x)), y


def after_split(folder: Path, transform: Callable[[Any], Any] | None) -> DataLoader[Any]:
    parts = random_split(folder_of(folder, None), [16, 6], torch.Generator().manual_seed(0))
    return DataLoader(Transformed(parts[0], transform), BATCH, shuffle=True, num_workers=2)


def concatenated(folder: Path, random: bool) -> DataLoader[Any]:
    chain = imagenet_v1(random)
    one, other = (
        datasets.ImageFolder(
            str(folder / "train"), chain, is_valid_file=functools.partial(in_half, half=half),
            allow_empty=True,
        )
        for half in (0, 1)
    )  # fmt: skip
    return DataLoader(ConcatDataset([one, other]), BATCH, shuffle=True, num_workers=2)


def in_half(path: str, half: int) -> bool:
    return int(Path(path).parent.name.removeprefix("class_")) % 2 == half


# ---- a table of file names, Pillow, timm's RandAugment -------------------------------------------


class TableOfPictures(Dataset[Any]):
    def __init__(self, table: Path, folder: Path, transform: Callable[[Any], Any] | None) -> None:
        self.labels = library("pandas").read_csv(table)
        self.folder = folder
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        opened = Image.open(self.folder / str(self.labels.iloc[index, 0])).convert("RGB")
        label = int(self.labels.iloc[index, 1])
        return (opened if self.transform is None else self.transform(opened)), label


def write_table(folder: Path) -> None:
    write_pictures(folder)
    lines = [f"{number:03d}.jpg,{number}" for number in range(COUNT)]
    (folder / "train.csv").write_text("\n".join(["file,label", *lines]) + "\n")


def timm_transform(random: bool) -> Callable[[Any], Any]:
    create_transform = library("timm.data").create_transform
    if not random:
        return create_transform(SIDE, is_training=False)
    return create_transform(
        SIDE, is_training=True, auto_augment="rand-m7-mstd0.5-inc1", re_prob=0.25
    )


def table(folder: Path, transform: Callable[[Any], Any] | None) -> DataLoader[Any]:
    dataset = TableOfPictures(folder / "train.csv", folder / "images", transform)
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=2)


# ---- broken files --------------------------------------------------------------------------------


class SkippedIfBroken(Dataset[Any]):
    """Gives None for a file that cannot be read, which the collate function drops."""

    def __init__(self, folder: Path, transform: Callable[[Any], Any] | None) -> None:
        self.files = sorted((folder / "images").glob("*.jpg"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        try:
            opened = Image.open(self.files[index]).convert("RGB")
        except OSError:
            return None
        return (opened if self.transform is None else self.transform(opened)), index


def without_none(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def write_with_broken(folder: Path) -> None:
    write_pictures(folder)
    for number in 5, 11:
        (folder / "images" / f"{number:03d}.jpg").write_bytes(b"no picture")


def some_broken(folder: Path, transform: Callable[[Any], Any] | None) -> DataLoader[Any]:
    return DataLoader(
        SkippedIfBroken(folder, transform), BATCH, shuffle=True, num_workers=2,
        collate_fn=without_none,
    )  # fmt: skip


def fixed_size(folder: Path, _random: bool) -> DataLoader[Any]:
    return some_broken(folder, transforms.Compose([transforms.Resize(SIDE), imagenet_v1(False)]))


CASES = (
    Pipeline(
        "ImageFolder, ImageNet transforms v1", "pytorch/examples imagenet", write_classes,
        image_folder,
    ),
    Pipeline(
        "references' v2, MixUp and CutMix in the collate", "torchvision references/classification",
        write_classes, reference_v2, ids=mixed_ids, content=None,
    ),
    Pipeline("CIFAR-10 v1", "kuangliu/pytorch-cifar", write_cifar, cifar),
    Pipeline(
        "MNIST, random_split", "Lightning's MNIST data module", write_mnist, mnist, random=False
    ),
    Pipeline(
        "ImageFolder, WeightedRandomSampler", "class balance in PyTorch forums", write_classes,
        weighted, with_replacement=True,
    ),
    Pipeline("ConcatDataset of two ImageFolders", "torch.utils.data docs", write_classes,
             concatenated),
    Pipeline(
        "transform around a random_split", "PyTorch forums", write_classes,
        lambda folder, random: after_split(folder, imagenet_v1(random)),
        each_picture(lambda folder: after_split(folder, None), imagenet_v1, "transform"),
        count=16,
    ),
    Pipeline(
        "CSV, pandas, Pillow, timm's RandAugment", "PyTorch's custom data set tutorial, timm",
        write_table, lambda folder, random: table(folder, timm_transform(random)),
        each_picture(lambda folder: table(folder, None), timm_transform, "transform"),
        packages=("pandas", "timm"),
    ),
    Pipeline(
        "None for a broken file, dropped in the collate", "PyTorch forums", write_with_broken,
        fixed_size, random=False, varying=True, count=COUNT - 2,
    ),
)  # fmt: skip
