"""Data and augmentations of tests of views and parts: a worker process has to import them."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

HEIGHT, WIDTH = 10, 12


def pixels(i: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


class Detections:
    """Pictures with everything that goes with them, as torchvision's classes say it."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        picture = torch.from_numpy(pixels(index)).permute(2, 0, 1)
        left, top = index % 5, index % 4
        boxes = torch.tensor([[left, top, left + 4, top + 3]])
        size = {"canvas_size": (HEIGHT, WIDTH)}
        return tv_tensors.Image(picture), {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", **size),  # pyright: ignore
            "mask": tv_tensors.Mask(picture[0].clone()),
            "points": tv_tensors.KeyPoints(torch.tensor([[left, top]]), **size),  # pyright: ignore
            "id": index,
        }


class Arrays:
    """The same as plain arrays [H, W, C], as albumentations takes them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture = pixels(index)
        box = np.array([[index % 5, index % 4, index % 5 + 4, index % 4 + 3]], dtype=np.float32)
        return {"image": picture, "mask": picture[..., 0].copy(), "boxes": box, "id": index}


class Pictures:
    """Pictures of Pillow and their labels."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(pixels(index)), index


moved = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(8)])
"""torchvision's transforms move all parts of a sample together."""
crop = v2.Compose([v2.RandomResizedCrop(6), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def noisy(picture: Image.Image) -> torch.Tensor:
    """It draws from every generator that all threads of a process share."""
    assert isinstance(picture, Image.Image)
    drawn = [float(torch.rand(())), random.random(), np.random.random()]
    return torch.tensor([float(np.asarray(picture)[0, 0, 0]), *drawn], dtype=torch.float64)


def flipped(sample: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(sample["image"], np.ndarray) and isinstance(sample["mask"], np.ndarray)
    step = random.choice((-1, 1))
    return {name: sample[name][:, ::step].copy() for name in ("image", "mask")}


def who(sample: Any) -> Any:
    return sample[1], os.getpid()


def failing(sample: Any) -> Any:
    if sample[1] == 7:
        raise ValueError("no augmentation for seven")
    return sample[1]


@dataclass(frozen=True)
class Meeting:
    """Waits until two processes are here."""

    folder: str

    def __call__(self, sample: Any) -> int:
        folder = Path(self.folder)
        (folder / str(os.getpid())).touch()
        until = time.monotonic() + 60
        while len(os.listdir(folder)) < 2:
            assert time.monotonic() < until, "a batch is changed by one process alone"
            time.sleep(0.01)
        return sample[1]


@dataclass(frozen=True)
class Deadly:
    """Kills its process once, at sample 3."""

    mark: str

    def __call__(self, sample: Any) -> Any:
        if sample[1] == 3 and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.rand(2), sample[1]


def told(batch: Any) -> Any:
    """A batch as plain values, to be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, tuple(batch.shape), batch.tolist()
    if isinstance(batch, dict):
        return {key: told(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [told(part) for part in batch]
    return batch
