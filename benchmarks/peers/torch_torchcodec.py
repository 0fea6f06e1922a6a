# pyright: basic, reportMissingImports=false
"""torch's DataLoader over TorchCodec's JPEG decoder and torchvision's transforms v2, uint8.
TorchCodec replaces torchvision's own decoders, which are deprecated."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchcodec.decoders import decode_jpeg
from torchvision.transforms import v2

from peers.contract import Batches, Job
from peers.folders import listing
from peers.torch_pillow import loader


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, folder: Path, transform: Any) -> None:  # Compose is untyped
        self.paths, self.labels = listing(folder)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(decode_jpeg(self.paths[index], mode="RGB")), self.labels[index]


@dataclass(frozen=True, slots=True)
class TorchTorchcodec:
    output: str = "uint8 CHW, antialiased"

    def prepare(self, job: Job, work: Path) -> None:
        pass

    def open(self, job: Job, work: Path) -> Batches:
        crop = v2.Compose([v2.RandomResizedCrop(job.crop), v2.RandomHorizontalFlip()])
        return loader(Pictures(job.folder, crop), job)
