"""The order of one pass: which samples are in the buffer, are served next, and leave it.

A pass admits every sample once, in the source's order, into a buffer of `capacity` slots, and
serves each exactly `reuse` times; then its slot falls free. It is pure and seeded. Positions count
samples in source order; the loader maps them to ids.

    rolling     decoding is steady, ages are mixed, and two serves of a sample lie at least about
                half a buffer apart (`rolling`)
    block       `capacity` slots are filled, served in R shuffled rounds, and refilled
    immediate   each batch is served R times in a row

Invariants for every seed (tests/property/test_reuse.py): every sample is served exactly R times;
never more than `capacity` samples are alive; no sample is twice in a batch while the buffer is
larger than a batch. A pass can be entered at any batch (`walk`), at the cost of a few buffers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

import numpy as np

from loaders.order.keyed_permutation import shuffled
from loaders.order.rolling import RollingPass
from loaders.order.serve import IntArray, Residents, Serve

Mode = Literal["rolling", "block", "immediate"]
MODES: tuple[Mode, ...] = get_args(Mode)
ORDER_STREAM = 1
"""Order and augmentation draw from different streams of one seed."""
READ_AHEAD = 3
"""So many batches of slots are read ahead where a larger buffer would mix nothing."""
ORDER_VERSION = 2
"""Raise it when the same seed would give another order. States of version 1 do not name it."""


@dataclass(frozen=True, slots=True)
class ReuseBuffer:
    """The plan of one pass. Iterating it gives its `Serve`s, the same ones every time."""

    samples: int
    batch_size: int
    reuse: int
    buffer_batches: int
    mode: Mode
    shuffle: bool
    drop_last: bool
    seed: tuple[int, ...]

    @property
    def capacity(self) -> int:
        return self.buffer_batches * self.batch_size

    @property
    def slots(self) -> int:
        """So many samples are in memory at most."""
        return min(self.capacity, self.samples)

    def __len__(self) -> int:
        return batches_per_pass(
            self.samples, self.batch_size, self.reuse, self.mode, self.drop_last
        )

    def __iter__(self) -> Iterator[Serve]:
        return self.walk(0)[1]

    def walk(self, batch: int) -> tuple[Residents, Iterator[Serve]]:
        """Who stands in the buffer before a batch, and the serves from there on."""
        if self.mode == "immediate":
            residents, serves = self._immediate(batch)
        elif self.mode == "block" or self.buffer_batches == 1:
            # In a buffer of one batch, rolling has no choice and equals blocks of one batch.
            residents, serves = self._blocks(batch)
        else:
            residents, serves = self.rolling.walk(batch)
        return residents, islice(serves, max(len(self) - batch, 0))

    @property
    def rolling(self) -> RollingPass:
        return RollingPass(
            self.samples, self.batch_size, self.reuse, self.buffer_batches, self.shuffle, self.seed
        )

    def _immediate(self, batch: int) -> tuple[Residents, Iterator[Serve]]:
        group, served = divmod(batch, self.reuse)
        positions = self._group(group)
        entered = int(positions[-1]) + 1 if len(positions) else self.samples
        first = np.full_like(positions, batch - served if served else -1)
        residents = Residents(positions, np.full_like(positions, served), first, entered)
        return residents, self._immediate_from(batch)

    def _immediate_from(self, batch: int) -> Iterator[Serve]:
        while len(positions := self._group(batch // self.reuse)):
            yield Serve(positions, np.full(len(positions), batch % self.reuse))
            batch += 1

    def _group(self, number: int) -> IntArray:
        start = number * self.batch_size
        return np.arange(start, min(start + self.batch_size, self.samples))

    # ---- block ----------------------------------------------------------------------------------

    def _blocks(self, batch: int) -> tuple[Residents, Iterator[Serve]]:
        # All blocks before the last two are full.
        number = max(min(batch // self._block_batches, self.samples // self.capacity - 1), 0)
        start, left = number * self.capacity, batch - number * self._block_batches
        block, serves = self._block(start)
        while left >= len(serves) and block[-1] + 1 < self.samples:
            left -= len(serves)
            block, serves = self._block(int(block[-1]) + 1)
        served, first = np.zeros_like(block), np.full_like(block, -1)
        for number, serve in enumerate(serves[:left], start=batch - left):
            at = serve.positions - block[0]
            first[at[serve.serves == 0]] = number
            np.add.at(served, at, 1)
        there = served < self.reuse
        residents = Residents(block[there], served[there], first[there], int(block[-1]) + 1)
        return residents, self._blocks_from(block, serves[left:])

    def _blocks_from(self, block: IntArray, serves: list[Serve]) -> Iterator[Serve]:
        yield from serves
        while block[-1] + 1 < self.samples:
            block, serves = self._block(int(block[-1]) + 1)
            yield from serves

    @property
    def _block_batches(self) -> int:
        """The batches of a full block."""
        return self.buffer_batches * self.reuse

    def _block(self, start: int) -> tuple[IntArray, list[Serve]]:
        block = np.arange(start, start + self._block_size(self.samples - start))
        return block, self._serves_of(block)

    def _block_size(self, remaining: int) -> int:
        """The size of the next block. The one before the last gives it a batch if it lacks one."""
        if remaining <= self.capacity:
            return remaining
        if remaining - self.capacity < self.batch_size and self.buffer_batches > 1:
            return self.capacity - self.batch_size
        return self.capacity

    def _serves_of(self, block: IntArray) -> list[Serve]:
        order: IntArray = np.empty(0, dtype=np.int64)
        nth: IntArray = np.empty(0, dtype=np.int64)
        for serve in range(self.reuse):
            round_ = block
            if self.shuffle:
                round_ = block[shuffled(len(block), *self.seed, int(block[0]), serve)]
            open_batch = len(order) % self.batch_size
            if open_batch and len(block) >= self.batch_size:
                # A batch that spans two rounds takes no sample twice.
                held = np.isin(round_, order[-open_batch:])
                head = round_[~held][: self.batch_size - open_batch]
                round_ = np.concatenate([head, round_[~np.isin(round_, head)]])
            order = np.concatenate([order, round_])
            nth = np.concatenate([nth, np.full(len(block), serve)])
        starts = range(0, len(order), self.batch_size)
        return [Serve(*(a[n : n + self.batch_size] for a in (order, nth))) for n in starts]


def buffered_batches(mode: Mode, reuse: int, buffer_batches: int) -> int:
    """The least buffer that serves in the same order as one of `buffer_batches`, and reads ahead.
    Where no sample waits for another serve, all of at least two batches do."""
    waits = mode == "block" or (mode == "rolling" and reuse > 1)
    return buffer_batches if waits else min(buffer_batches, READ_AHEAD)


def batches_per_pass(samples: int, batch_size: int, reuse: int, mode: Mode, drop_last: bool) -> int:
    """How many batches one pass serves. It is the `len()` of the loader."""

    def count(items: int) -> int:
        return items // batch_size if drop_last else -(-items // batch_size)

    return reuse * count(samples) if mode == "immediate" else count(samples * reuse)
