# pyright: basic, reportMissingImports=false
"""WebDataset: the JPEGs as they are in tar files, read in sequence, shuffled in a buffer."""

import io
import random
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds

from benchmarks.peers import cropping
from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.folders import listing

SHARDS, SHUFFLED = 16, 1000


@dataclass(frozen=True, slots=True)
class Load:
    """One sample; a class, since worker processes want it by name."""

    size: int

    def __call__(self, sample: dict[str, Any]) -> tuple[Any, int]:
        return cropping.decode(sample["jpg"], self.size), int(sample["cls"])


def collate(samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
    pixels, labels = zip(*samples, strict=True)
    return np.stack(pixels), np.array(labels)


class WebDatasetTar(Peer):
    output = cropping.OUTPUT

    def prepare(self, job: Job, work: Path) -> None:
        paths, labels = listing(job.folder)
        samples = list(zip(paths, labels, strict=True))
        random.Random(job.seed).shuffle(samples)  # as its users do: its buffer only mixes locally
        for shard in range(SHARDS):
            with tarfile.open(work / f"{shard:03d}.tar", "w") as tar:
                for number, (path, label) in enumerate(samples[shard::SHARDS]):
                    add(tar, f"{number:06d}.jpg", path.read_bytes())
                    add(tar, f"{number:06d}.cls", str(label).encode())

    def open(self, job: Job, work: Path) -> Batches:
        shards = sorted(str(file) for file in work.glob("*.tar"))
        dataset = (
            wds.WebDataset(shards, shardshuffle=SHARDS, seed=job.seed)
            .shuffle(SHUFFLED)
            .map(Load(job.crop))
            .batched(job.batch, collation_fn=collate)
        )
        return wds.WebLoader(
            dataset, batch_size=None, num_workers=job.workers, persistent_workers=True
        )


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
