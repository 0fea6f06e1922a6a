"""torch's DataLoader with the cheapest decoder and crop, uint8: its processes and nothing else."""

from pathlib import Path

import torch
from torch.utils.data import Dataset

from benchmarks.peers import cropping
from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.folders import listing
from benchmarks.peers.torch_pillow import loader


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, job: Job) -> None:
        self.paths, self.labels = listing(job.folder)
        self.size = job.crop

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = cropping.decode(self.paths[index].read_bytes(), self.size)
        return torch.from_numpy(pixels), self.labels[index]


class TorchSimplejpeg(Peer):
    output = cropping.OUTPUT

    def open(self, job: Job, work: Path) -> Batches:
        return loader(Pictures(job), job)
