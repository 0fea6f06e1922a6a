# pyright: basic, reportMissingImports=false
"""Meta's SPDL: its pipeline of stages over a thread pool, a batch a task.

With simplejpeg and OpenCV: its own decoder, FFmpeg's, took twice the time in our survey.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spdl.pipeline import PipelineBuilder

from benchmarks.peers import cropping
from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.folders import listing


class Spdl:
    def __init__(self, job: Job) -> None:
        self.paths, self.labels = listing(job.folder)
        self.job = job

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(range(len(self.paths)), len(self.paths))
        step, workers = self.job.batch, self.job.workers
        pipeline = (
            PipelineBuilder()
            .add_source(order[i : i + step] for i in range(0, len(order), step))
            .pipe(self.load, concurrency=workers)
            .add_sink(2)
            .build(num_threads=workers)
        )
        with pipeline.auto_stop():
            yield from pipeline

    def load(self, ids: list[int]) -> Any:
        pixels = cropping.decode_files([self.paths[i] for i in ids], self.job.crop)
        return pixels, [self.labels[i] for i in ids]


class SpdlThreads(Peer):
    output = cropping.OUTPUT

    def open(self, job: Job, work: Path) -> Batches:
        random.seed(job.seed)
        return Spdl(job)
