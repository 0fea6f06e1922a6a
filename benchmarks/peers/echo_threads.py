"""No library: a thread pool and a naive echo buffer. What reuse is up against with everything else
equal: a few batches are decoded, served so many times in shuffled order, and then replaced."""

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from peers import cropping
from peers.contract import Batches, Job
from peers.folders import listing

BUFFER = 3
"""Batches, as ours has by default."""
TASK = 8
"""Pictures a task: a future costs as much as moving one."""

Decoded = list[NDArray[np.uint8]]


class Echo:
    def __init__(self, job: Job, reuse: int) -> None:
        self.paths, self.labels = listing(job.folder)
        self.job, self.reuse = job, reuse
        self.pool = ThreadPoolExecutor(job.workers)

    def __iter__(self) -> Iterator[tuple[NDArray[np.uint8], list[int]]]:
        order = random.sample(range(len(self.paths)), len(self.paths))
        size = BUFFER * self.job.batch
        buffers = [order[i : i + size] for i in range(0, len(order), size)]
        following = self._decode(buffers[0])
        for number, ids in enumerate(buffers):
            held = [pixels for task in following for pixels in task.result()]
            if number + 1 < len(buffers):
                following = self._decode(buffers[number + 1])
            rounds = [random.sample(range(len(ids)), len(ids)) for _ in range(self.reuse)]
            places = [place for one in rounds for place in one]
            for first in range(0, len(places), self.job.batch):
                chosen = places[first : first + self.job.batch]
                yield self._crop(held, chosen), [self.labels[ids[place]] for place in chosen]

    def _decode(self, ids: list[int]) -> list[Future[Decoded]]:
        def decode(some: list[int]) -> Decoded:
            return [simplejpeg.decode_jpeg(self.paths[index].read_bytes()) for index in some]

        return [self.pool.submit(decode, ids[i : i + TASK]) for i in range(0, len(ids), TASK)]

    def _crop(self, held: Decoded, chosen: list[int]) -> NDArray[np.uint8]:
        out = np.empty((len(chosen), self.job.crop, self.job.crop, 3), np.uint8)

        def crop(first: int) -> None:
            for place, index in zip(out[first:], chosen[first : first + TASK], strict=False):
                cropping.crop_into(place, held[index])

        for task in [self.pool.submit(crop, first) for first in range(0, len(chosen), TASK)]:
            task.result()
        return out


@dataclass(frozen=True, slots=True)
class EchoThreads:
    reuse: int
    output: str = cropping.OUTPUT

    def prepare(self, job: Job, work: Path) -> None:
        pass

    def open(self, job: Job, work: Path) -> Batches:
        random.seed(job.seed)
        return Echo(job, self.reuse)
