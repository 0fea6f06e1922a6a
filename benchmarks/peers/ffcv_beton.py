# pyright: basic, reportMissingImports=false
"""FFCV: pictures converted to one file, as JPEGs or as pixels, and a compiled pipeline over it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor
from ffcv.writer import DatasetWriter
from PIL import Image

from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.folders import listing

QUALITY = 85
"""Its writer encodes every picture again: at this quality, to files as large as those we used."""


class Photos:
    def __init__(self, folder: Path) -> None:
        self.paths, self.labels = listing(folder)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.paths[index]) as picture:
            return np.asarray(picture.convert("RGB")), self.labels[index]


@dataclass(frozen=True, slots=True)
class FfcvPhotos(Peer):
    mode: Literal["jpg", "raw"]
    output = "uint8 HWC, area"

    def prepare(self, job: Job, work: Path) -> None:
        image = RGBImageField(write_mode=self.mode, jpeg_quality=QUALITY)
        write(Photos(job.folder), image, job, work)

    def open(self, job: Job, work: Path) -> Batches:
        decoder = RandomResizedCropRGBImageDecoder((job.crop, job.crop))
        return read(job, work, [decoder, RandomHorizontalFlip(), ToTensor()])


def write(dataset: Any, image: Any, job: Job, work: Path) -> None:
    fields = {"image": image, "label": IntField()}
    writer = DatasetWriter(str(work / "pictures.beton"), fields, num_workers=job.workers)
    writer.from_indexed_dataset(dataset)


def read(job: Job, work: Path, image: list[Any]) -> Batches:
    return Loader(
        str(work / "pictures.beton"), batch_size=job.batch, num_workers=job.workers,
        order=OrderOption.RANDOM, os_cache=True, drop_last=False, seed=job.seed,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor(), Squeeze()]},
    )  # fmt: skip
