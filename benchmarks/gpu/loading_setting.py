"""Which pictures part g serves, how large and how many: given ones, or drawn and made once."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from gpu.part import Job
from loaders.pixels.augmentation import Chain, Flip, PadCrop, RandomResizedCrop

SEED = 0


@dataclass(frozen=True, slots=True)
class Setting:
    data: str
    device: str
    pictures: int
    batch: int
    side: int
    """Of the pictures that are served."""
    named: str
    folder: Path
    """Of photos."""

    @property
    def augment(self) -> Chain:
        first = PadCrop(4) if self.data == "cifar10" else RandomResizedCrop(self.side)
        return Chain([first, Flip()])


def setting(data: str, job: Job) -> Setting:
    if data == "cifar10":
        count, batch = (60, 20) if job.smoke else (50_000, 512)
        return Setting(data, job.device, count, batch, 32, "drawn", Path(job.work))
    count, batch = (8, 4) if job.smoke else (2048, 128)
    given = Path(job.data or "/nowhere") / "photos"
    if given.is_dir():
        return Setting(data, job.device, count, batch, 224, "of --data", given)
    folder = drawn_photos(Path(job.work) / f"photos{count}", count)
    side = 64 if job.smoke else 224
    return Setting(data, job.device, count, batch, side, "drawn", folder)


def drawn_photos(folder: Path, count: int) -> Path:
    """JPEGs of 500 x 375, smooth as photos are; made once."""
    whole = folder / "whole"
    if whole.exists():
        return folder / "pictures"
    rng = np.random.default_rng(SEED)
    for number in range(count):
        place = folder / "pictures" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = torch.from_numpy(rng.integers(0, 256, (1, 3, 48, 64), np.uint8)).float()
        smooth = torch.nn.functional.interpolate(coarse, (375, 500), mode="bicubic")
        pixels = smooth.clamp(0, 255).byte()[0].permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(pixels).save(place / f"{number:05d}.jpg", quality=90)
    whole.touch()
    return folder / "pictures"


def drawn_pictures(where: Setting, side: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rng = np.random.default_rng(SEED)
    pixels = rng.integers(0, 256, (where.pictures, side, side, 3), np.uint8)
    return pixels, rng.integers(0, 10, where.pictures)
