"""torch's DataLoader over Pillow and torchvision's transforms: what most people have.

"floats" resizes first and ends in normalised float32, as everybody's recipe does; v2 works on
uint8 tensors and stays there. Both resize with antialiasing.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.folders import listing

Version = Literal["floats", "v2"]
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


class DecodedPictures(Pictures):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = decode_jpeg(read_file(str(self.paths[index])), ImageReadMode.RGB)
        return self.transform(pixels), self.labels[index]


class TorchDecodeJpeg(Peer):
    output = "uint8 CHW, antialiased"

    def open(self, job: Job, work: Path) -> Batches:
        return loader(DecodedPictures(job.folder, transform("v2", job.crop)), job)


class TorchPillow(Peer):
    def __init__(self, version: Version) -> None:
        self.version: Version = version
        self.output = f"{'float32' if version == 'floats' else 'uint8'} CHW, antialiased"

    def open(self, job: Job, work: Path) -> Batches:
        return loader(Pictures(job.folder, transform(self.version, job.crop)), job)


def transform(version: Version, crop: int) -> Any:
    if version == "floats":
        return transforms.Compose([
            transforms.Resize(256), transforms.RandomResizedCrop(crop),
            transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize(MEAN, SPREAD),
        ])  # fmt: skip
    return v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(crop), v2.RandomHorizontalFlip()])


def loader(dataset: Dataset[Any], job: Job) -> DataLoader[Any]:
    torch.manual_seed(job.seed)
    return DataLoader(
        dataset, job.batch, shuffle=True, num_workers=job.workers, persistent_workers=True
    )
