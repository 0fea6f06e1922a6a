"""The ceiling of ceilings: gathering a shuffled batch's bytes from memory, and nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.contract import Batches, Job, Peer


class Gather:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.rng = np.random.default_rng(job.seed)
        shape = (job.pictures, job.crop, job.crop, 3)
        self.pixels = self.rng.integers(0, 256, shape, np.uint8)
        self.batch = np.empty((job.batch, *shape[1:]), np.uint8)

    def __iter__(self) -> Iterator[Any]:
        order = self.rng.permutation(self.job.pictures)
        for start in range(0, len(order), self.job.batch):
            ids = order[start : start + self.job.batch]
            batch = self.batch[: len(ids)]
            # "clip": the mode in which numpy writes to `out` without a copy in between.
            np.take(self.pixels, ids, axis=0, out=batch, mode="clip")
            yield batch, ids


class MemoryCopy(Peer):
    def open(self, job: Job, work: Path) -> Batches:
        return Gather(job)
