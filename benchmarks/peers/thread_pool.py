"""No library: a thread pool decodes straight into preallocated batches. What reuse is up against
with everything else equal."""

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import cropping
from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.folders import listing

AHEAD = 3
"""Batches under way while the consumer has one."""
TASK = 8
"""Pictures a task: a future costs as much as moving one."""


class Threads:
    def __init__(self, job: Job) -> None:
        self.paths, self.labels = listing(job.folder)
        self.job = job
        self.pool = ThreadPoolExecutor(job.workers)
        shape = (AHEAD + 1, job.batch, job.crop, job.crop, 3)
        self.ring = np.empty(shape, np.uint8)

    def __iter__(self) -> Iterator[tuple[NDArray[np.uint8], list[int]]]:
        order = random.sample(range(len(self.paths)), len(self.paths))
        batches = [order[i : i + self.job.batch] for i in range(0, len(order), self.job.batch)]
        under_way: deque[list[Future[None]]] = deque()
        for number in range(len(batches) + AHEAD):
            if number < len(batches):
                under_way.append(self._start(batches[number], self.ring[number % (AHEAD + 1)]))
            if number >= AHEAD:
                ids = batches[number - AHEAD]
                for task in under_way.popleft():
                    task.result()
                pixels = self.ring[(number - AHEAD) % (AHEAD + 1)]
                yield pixels[: len(ids)], [self.labels[i] for i in ids]

    def _start(self, ids: list[int], into: NDArray[np.uint8]) -> list[Future[None]]:
        starts = range(0, len(ids), TASK)
        return [self.pool.submit(self._decode, ids[i : i + TASK], into[i:]) for i in starts]

    def _decode(self, ids: list[int], into: NDArray[np.uint8]) -> None:
        for place, index in zip(into, ids, strict=False):
            cropping.decode_into(place, self.paths[index].read_bytes())


class ThreadPool(Peer):
    output = cropping.OUTPUT

    def open(self, job: Job, work: Path) -> Batches:
        random.seed(job.seed)
        return Threads(job)
