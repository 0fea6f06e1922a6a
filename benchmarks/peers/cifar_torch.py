"""CIFAR-10 without a loader library: torch's DataLoader a sample at a time, and a batch at once.

All: pad by 4 and crop, flip, cutout of 8, collate; uint8. There is nothing to decode here: what the
rows differ in is how much Python a picture costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.transforms import v2

from benchmarks.peers.contract import Batches, Job
from benchmarks.peers.folders import cifar10
from benchmarks.peers.torch_pillow import loader

PAD, HOLE = 4, 8


def cutout(image: torch.Tensor) -> torch.Tensor:
    """One zero square; it may reach over the edge."""
    height, width = image.shape[-2:]
    y, x = int(torch.randint(height, ())) - HOLE // 2, int(torch.randint(width, ())) - HOLE // 2
    image[:, max(0, y) : max(0, y + HOLE), max(0, x) : max(0, x + HOLE)] = 0
    return image


class Samples(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, job: Job, version: Literal["v1", "v2"]) -> None:
        pixels, self.labels = cifar10(job.folder, job.pictures)
        if version == "v1":
            self.pictures: list[Any] = [Image.fromarray(p) for p in pixels]
            self.transform: Any = transforms.Compose([
                transforms.RandomCrop(32, PAD), transforms.RandomHorizontalFlip(),
                transforms.PILToTensor(), transforms.Lambda(cutout),
            ])  # fmt: skip
        else:
            self.pictures = list(torch.from_numpy(pixels).permute(0, 3, 1, 2))
            self.transform = v2.Compose([
                v2.RandomCrop(32, PAD), v2.RandomHorizontalFlip(), v2.Lambda(cutout),
            ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.pictures[index]), int(self.labels[index])


class BatchAtOnce:
    def __init__(self, job: Job) -> None:
        pixels, labels = cifar10(job.folder, job.pictures)
        padded = torch.nn.functional.pad(torch.from_numpy(pixels), [0, 0, PAD, PAD, PAD, PAD])
        # A view [N, 9, 9, 32, 32, 3]: every window there is, nothing copied.
        self.windows = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(0, 1, 2, 4, 5, 3)
        self.labels, self.batch = torch.from_numpy(labels), job.batch
        torch.manual_seed(job.seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids in torch.randperm(len(self.labels)).split(self.batch):
            n = len(ids)
            shifts = torch.randint(2 * PAD + 1, (2, n))
            images = self.windows[ids, shifts[0], shifts[1]]
            flipped = torch.rand(n) < 0.5
            images[flipped] = images[flipped].flip(2)
            places = torch.arange(32)
            corner = torch.randint(32, (2, n, 1)) - HOLE // 2
            inside = (places >= corner) & (places < corner + HOLE)
            images.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[..., None], 0)
            yield images, self.labels[ids]


@dataclass(frozen=True, slots=True)
class CifarTorch:
    version: Literal["v1", "v2", "batched"]

    @property
    def output(self) -> str:
        return "uint8 HWC" if self.version == "batched" else "uint8 CHW"

    def prepare(self, job: Job, work: Path) -> None:
        pass

    def open(self, job: Job, work: Path) -> Batches:
        if self.version == "batched":
            return BatchAtOnce(job)
        return loader(Samples(job, self.version), job)
