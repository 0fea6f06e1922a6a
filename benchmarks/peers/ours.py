"""Ours, through the public interface: `ReuseLoader` over a folder, and adopted.

reuse              the full picture is kept, every serve crops it anew and flips it
cache              decoded pictures stay, so that a later pass decodes nothing (the first pass,
                   which warms it, is not measured)
whole              pictures are decoded and kept whole, as where the first step is no crop
decoded            the ceiling: an array of squares as large as the pictures on average, served
                   straight out of it: nothing to decode or to move
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.folders import listing
from loaders import Cache, ReuseLoader
from loaders.pixels.augmentation import (
    Chain,
    Draws,
    Flip,
    Geometric,
    RandomResizedCrop,
)
from loaders.pixels.placing import Placing
from loaders.sources.datasets import PictureArrays, PictureFiles, picture_folder

CACHE_BYTES = 1 << 34
"""A bound that no run here comes near."""


def decoded(folder: Path, side: int) -> PictureArrays:
    """All pictures as squares in one array, from which they are served without another copy."""
    files = picture_folder(folder, side)
    pixels = np.empty((len(files), side, side, 3), np.uint8)
    for index in range(len(files)):
        pixels[index] = files[index][0].permute(1, 2, 0)
    return PictureArrays(pixels, np.asarray(files.labels), files.classes)


def mean_side(folder: Path) -> int:
    """Of squares with as many pixels as the pictures have on average."""
    areas = []
    for path in listing(folder)[0]:
        with Image.open(path) as picture:  # reads its head only
            areas.append(picture.width * picture.height)
    return round(float(np.mean(areas)) ** 0.5)


@dataclass(frozen=True, slots=True)
class DecodedWhole(Geometric):
    """The same crop, of which nobody knows before the picture is decoded."""

    crop: RandomResizedCrop
    stage = 1
    any_size = True

    def place(self, placing: Placing, draws: Draws) -> Placing:
        return self.crop.place(placing, draws)


@dataclass(frozen=True, slots=True)
class OurPhotos(Peer):
    reuse: int
    cache: Literal["ram", "disk"] | None = None
    decoded: bool = False
    whole: bool = False
    output = "uint8 CHW, box mean, linear"

    def open(self, job: Job, work: Path) -> Batches:
        crop = RandomResizedCrop(job.crop)  # torchvision's ranges
        first = DecodedWhole(crop) if self.whole else crop
        options: dict[str, Any] = {"augment": Chain([first, Flip()])}
        if self.cache is not None:
            folder = work if self.cache == "disk" else None
            options["cache"] = Cache(self.cache, CACHE_BYTES, folder)
        return ReuseLoader(
            self.dataset(job), job.batch, reuse=self.reuse, workers=job.workers, seed=job.seed,
            **options,
        )  # fmt: skip

    def dataset(self, job: Job) -> PictureFiles | PictureArrays:
        if self.decoded:
            return decoded(job.folder, mean_side(job.folder))
        return picture_folder(job.folder)


class AdoptedPhotos(Peer):
    """The path that most users take: the DataLoader of an ImageFolder, taken over."""

    def __init__(
        self,
        reuse: int,
        version: Literal["floats", "v2"],
        decode: Literal["exact", "scaled"] = "exact",
    ) -> None:
        self.reuse = reuse
        self.version: Literal["floats", "v2"] = version
        self.decode: Literal["exact", "scaled"] = decode
        self.output = f"{'float32' if version == 'floats' else 'uint8'} CHW"

    def open(self, job: Job, work: Path) -> Batches:
        from torchvision.datasets import ImageFolder  # the other peers here do without torchvision

        from benchmarks.peers.torch_pillow import loader, transform

        dataset = ImageFolder(job.folder, transform=transform(self.version, job.crop))
        theirs = loader(dataset, job)
        return ReuseLoader.from_dataloader(theirs, reuse=self.reuse, decode=self.decode)
