"""Several views of a picture: SimCLR, DINO, pairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from surveyed_pipelines.made_up_data import nothing, pixels, write_classes
from surveyed_pipelines.picture_pipelines import folder_of, imagenet_v1
from surveyed_pipelines.pipeline_case import BATCH, COUNT, SIDE, Form, Pipeline, adopted, library

Transform = Callable[[Any], Any]


class Views:
    """A transform that gives several views of a picture, as a list."""

    def __init__(self, transforms: list[Transform]) -> None:
        self.transforms = transforms

    def __call__(self, picture: Any) -> list[Any]:
        return [transform(picture) for transform in self.transforms]


def simclr(random: bool, side: int = SIDE) -> Transform:
    if not random:
        return imagenet_v1(False)
    jitter = transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)
    return transforms.Compose(
        [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(),
         transforms.RandomApply([jitter], p=0.8), transforms.RandomGrayscale(p=0.2),
         transforms.GaussianBlur(3), transforms.ToTensor()]
    )  # fmt: skip


def two_views(folder: Path, random: bool) -> DataLoader[Any]:
    dataset = folder_of(folder, Views([simclr(random)] * 2))
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=2, drop_last=False)


def crops(random: bool) -> list[Transform]:
    """DINO's: two large ones, and small ones."""
    return [*[simclr(random, SIDE)] * 2, *[simclr(random, SIDE // 2)] * 4]


def dino_crops(folder: Path, random: bool) -> DataLoader[Any]:
    dataset = folder_of(folder, Views(crops(random)))
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=2)


def without_transform(folder: Path, reuse: int, **changes: Any) -> Any:
    dataset = folder_of(folder, None)
    dataloader: DataLoader[Any] = DataLoader(dataset, BATCH, shuffle=True, num_workers=2)
    return adopted(dataloader, reuse, **changes)


def simclr_twice(folder: Path, random: bool, reuse: int) -> Any:
    return without_transform(folder, reuse, augment=[simclr(random)] * 2)


def a_view_of_each(folder: Path, random: bool, reuse: int) -> Any:
    return without_transform(folder, reuse, augment=crops(random))


def views_of_each(batch: Any) -> list[Any]:
    return [list(views) for views in zip(*batch[0], strict=True)]


# ---- lightly -------------------------------------------------------------------------------------


def lightly_simclr(random: bool) -> Transform:
    views = library("lightly.transforms").SimCLRTransform
    return views(input_size=SIDE) if random else Views([imagenet_v1(False)] * 2)


def lightly(folder: Path, random: bool) -> DataLoader[Any]:
    dataset = library("lightly.data").LightlyDataset(
        str(folder / "train"), transform=lightly_simclr(random)
    )
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=2, drop_last=False)


def lightly_fixed(folder: Path, random: bool, reuse: int) -> Any:
    """LightlyDataset without a transform gives pictures of Pillow."""
    dataset = library("lightly.data").LightlyDataset(str(folder / "train"))
    dataloader = DataLoader(dataset, BATCH, shuffle=True, num_workers=2)
    return adopted(dataloader, reuse, augment=lightly_simclr(random))


# ---- pairs that [i] draws ------------------------------------------------------------------------


class Pairs(Dataset[Any]):
    """Each picture with another one that is drawn, as for a siamese network."""

    def __init__(self, random: bool) -> None:
        self.random = random

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        other = np.random.randint(COUNT) if self.random else (index + 1) % COUNT
        one, two = (pixels(n, SIDE, SIDE).transpose(2, 0, 1).copy() for n in (index, other))
        return one, two, np.float32(other % 2 == index % 2), index


def pairs(_folder: Path, random: bool) -> DataLoader[Any]:
    return DataLoader(Pairs(random), BATCH, shuffle=True, num_workers=2)


CASES = (
    Pipeline(
        "SimCLR, two views", "sthalles/SimCLR", write_classes, two_views,
        (Form("`augment=[transform, transform]`", simclr_twice),), content=views_of_each,
    ),
    Pipeline(
        "DINO, 2 + 4 crops", "facebookresearch/dino", write_classes, dino_crops,
        (Form("`augment=[...]`, a transform for each view", a_view_of_each),),
        content=views_of_each,
    ),
    Pipeline(
        "SimCLR of lightly, LightlyDataset", "lightly's tutorials", write_classes, lightly,
        (Form("`augment=transform`", lightly_fixed),), packages=("lightly",),
        content=views_of_each,
    ),
    Pipeline(
        "pairs drawn in [i]", "pytorch/examples siamese_network", nothing, pairs,
        (Form("`reaugment=False`",
              lambda folder, random, reuse: adopted(pairs(folder, random), reuse, reaugment=False),
              redrawn=False),),
        ids=lambda batch: batch[3].tolist(), content=lambda batch: batch[1],
    ),
)  # fmt: skip
