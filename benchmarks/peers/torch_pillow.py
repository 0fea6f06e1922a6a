"""torch's DataLoader over Pillow and torchvision's transforms: what most people have.

v1 ends in normalised float32, as everybody's recipe does; v2 works on uint8 tensors and stays
there. Both resize with antialiasing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import v2

from peers.contract import Batches, Job
from peers.folders import listing

Version = Literal["v1", "v2"]
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, folder: Path, transform: Any) -> None:  # Compose is untyped
        self.paths, self.labels = listing(folder)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as picture:
            return self.transform(picture.convert("RGB")), self.labels[index]


@dataclass(frozen=True, slots=True)
class TorchPillow:
    version: Version

    @property
    def output(self) -> str:
        return f"{'float32' if self.version == 'v1' else 'uint8'} CHW, antialiased"

    def prepare(self, job: Job, work: Path) -> None:
        pass

    def open(self, job: Job, work: Path) -> Batches:
        return loader(Pictures(job.folder, transform(self.version, job.crop)), job)


def transform(version: Version, crop: int) -> Any:
    if version == "v1":
        return transforms.Compose([
            transforms.RandomResizedCrop(crop), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(), transforms.Normalize(MEAN, SPREAD),
        ])  # fmt: skip
    return v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(crop), v2.RandomHorizontalFlip()])


def loader(dataset: Dataset[Any], job: Job) -> DataLoader[Any]:
    torch.manual_seed(job.seed)
    return DataLoader(
        dataset, job.batch, shuffle=True, num_workers=job.workers, persistent_workers=True
    )
