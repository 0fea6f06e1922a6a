# pyright: basic, reportMissingImports=false
"""torch's DataLoader over TorchCodec's JPEG decoder and torchvision's transforms v2, uint8.
TorchCodec replaces torchvision's own decoders, which are deprecated."""

from pathlib import Path

import torch
from torchcodec.decoders import decode_jpeg
from torchvision.transforms import v2

from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.torch_pillow import Pictures, loader


class DecodedPictures(Pictures):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(decode_jpeg(self.paths[index], mode="RGB")), self.labels[index]


class TorchTorchcodec(Peer):
    output = "uint8 CHW, antialiased"

    def open(self, job: Job, work: Path) -> Batches:
        crop = v2.Compose([v2.RandomResizedCrop(job.crop), v2.RandomHorizontalFlip()])
        return loader(DecodedPictures(job.folder, crop), job)
