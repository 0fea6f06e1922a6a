"""CIFAR-10 as JPEG files of 256 pixels, and a data module of them as a user would write it."""

from pathlib import Path

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

SIDE, STORED = 256, 32
"""Pixels of a file, and of a decoded sample."""


def write_pictures(pixels: NDArray[np.uint8], labels: NDArray[np.int64], into: Path) -> None:
    """`into`/CLASS/NUMBER.jpg, each enlarged. A file that is there stays."""
    for number, (picture, label) in enumerate(zip(pixels, labels, strict=True)):
        path = into / str(label) / f"{number:05d}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            large = Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            large.save(part, format="JPEG", quality=90)
            part.rename(path)


class EnlargedCifar(L.LightningDataModule):
    """Training decodes a file a sample. Pictures of evaluation are decoded once, beforehand."""

    def __init__(self, root: str) -> None:
        super().__init__()
        shrink = v2.Compose([v2.Resize(STORED), v2.PILToTensor()])
        self.folders = {
            part: ImageFolder(Path(root, part), transform=shrink)
            for part in ("train", "val", "test")
        }

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, int]]:
        return DataLoader(self.folders["train"], batch_size=320, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return self._evaluated("val")

    def test_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return self._evaluated("test")

    def _evaluated(self, part: str) -> DataLoader[tuple[torch.Tensor, ...]]:
        folder = self.folders[part]
        pixels = torch.stack([folder[index][0] for index in range(len(folder))])
        return DataLoader(TensorDataset(pixels, torch.tensor(folder.targets)), batch_size=500)
