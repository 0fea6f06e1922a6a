# pyright: basic, reportMissingImports=false
"""Google's Grain: a map-style data set, read by its threads, shuffled and batched by it."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain

from benchmarks.peers import cropping
from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.folders import listing


class Grain:
    def __init__(self, job: Job) -> None:
        paths, labels = listing(job.folder)
        self.samples = list(zip(paths, labels, strict=True))
        self.job = job
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        seed = self.job.seed + self.passes
        samples = grain.MapDataset.source(self.samples).seed(seed).shuffle().map(self.load)
        reading = grain.ReadOptions(
            num_threads=self.job.workers, prefetch_buffer_size=2 * self.job.batch
        )
        yield from samples.to_iter_dataset(reading).batch(self.job.batch)

    def load(self, sample: tuple[Path, int]) -> tuple[Any, int]:
        path, label = sample
        return cropping.decode_files([path], self.job.crop)[0], label


class GrainThreads(Peer):
    output = cropping.OUTPUT

    def open(self, job: Job, work: Path) -> Batches:
        random.seed(job.seed)
        return Grain(job)
