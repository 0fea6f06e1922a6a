"""The order of one pass: which samples are in the buffer, are served next, and leave it.

The order is pure and seeded. A pass admits every sample once, in the source's order, into a buffer
of `capacity` slots, and serves each exactly `reuse` times. After a sample's last serve its slot
falls free for the next one. Positions count samples in source order (0, 1, ...); the loader maps
them to dataset ids.

    rolling     position i is due at virtual time i, then once in each later R-th part of its life
                (`capacity` admissions long), at a random moment of the part's first half:

                i |1st.......|..2nd....|....3rd..| slot goes to i + capacity      (R = 3)

                A batch is made of the most overdue samples. So decoding is steady, ages are mixed,
                and two serves of a sample lie at least about half a buffer apart.
    block       `capacity` slots are filled, served in R shuffled rounds, and refilled (thesis,
                fig. 4-8).
    immediate   each batch is served R times in a row (thesis, section 4.4.3).

Invariants for every seed (tests/property/test_reuse.py): every sample is served exactly R times;
never more than `capacity` samples are alive; no sample is twice in a batch while the buffer is
larger than a batch. The last one needs care where a pass drains: a sample with as many serves left
as there are full batches left is critical and goes first (McNaughton's wrap-around argument).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Mode = Literal["rolling", "block", "immediate"]
MODES: tuple[Mode, ...] = get_args(Mode)
ORDER_STREAM = 1
"""Order and augmentation draw from different streams of one seed."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Serve:
    """One batch: its positions, and for each the number (0, 1, ...) of its serve in this pass."""

    positions: IntArray
    serves: IntArray


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

    def __len__(self) -> int:
        return batches_per_pass(
            self.samples, self.batch_size, self.reuse, self.mode, self.drop_last
        )

    def __iter__(self) -> Iterator[Serve]:
        rng = np.random.default_rng(np.random.SeedSequence(self.seed))
        if self.mode == "immediate":
            batches = self._immediate()
        elif self.mode == "block" or self.buffer_batches == 1:
            # In a buffer of one batch, rolling has no choice and equals blocks of one batch.
            batches = self._block(rng)
        else:
            batches = self._rolling(rng)
        for _, batch in zip(range(len(self)), batches, strict=False):
            yield batch

    def _immediate(self) -> Iterator[Serve]:
        for start in range(0, self.samples, self.batch_size):
            positions = np.arange(start, min(start + self.batch_size, self.samples))
            for serve in range(self.reuse):
                yield Serve(positions, np.full(len(positions), serve))

    def _block(self, rng: np.random.Generator) -> Iterator[Serve]:
        start = 0
        while start < self.samples:
            size = self._block_size(self.samples - start)
            yield from self._serve_block(np.arange(start, start + size), rng)
            start += size

    def _block_size(self, remaining: int) -> int:
        """The size of the next block. Blocks are full, but the last one is never smaller than a
        batch: the block before it gives it one batch."""
        if remaining <= self.capacity:
            return remaining
        if remaining - self.capacity < self.batch_size and self.buffer_batches > 1:
            return self.capacity - self.batch_size
        return self.capacity

    def _serve_block(self, block: IntArray, rng: np.random.Generator) -> Iterator[Serve]:
        order: IntArray = np.empty(0, dtype=np.int64)
        for _ in range(self.reuse):
            round_ = rng.permutation(block) if self.shuffle else block
            open_batch = len(order) % self.batch_size
            if open_batch and len(block) >= self.batch_size:
                # A batch that spans two rounds takes no sample twice.
                held = np.isin(round_, order[-open_batch:])
                head = round_[~held][: self.batch_size - open_batch]
                round_ = np.concatenate([head, round_[~np.isin(round_, head)]])
            order = np.concatenate([order, round_])
        served: dict[int, int] = {}
        for first in range(0, len(order), self.batch_size):
            positions = order[first : first + self.batch_size]
            serves = np.empty(len(positions), dtype=np.int64)
            for k, position in enumerate(positions.tolist()):
                serves[k] = served.get(position, 0)
                served[position] = serves[k] + 1
            yield Serve(positions, serves)

    def _rolling(self, rng: np.random.Generator) -> Iterator[Serve]:
        slots = min(self.capacity, self.samples)
        part = self.capacity / self.reuse  # the length of one part of a life, in admissions
        spread = 0.5 if self.shuffle else 0.0

        def lives(first: int, count: int) -> NDArray[np.float64]:
            """When each of `count` newly admitted positions is due, serve by serve."""
            due = np.arange(first, first + count)[:, None] + np.arange(self.reuse)[None, :] * part
            due[:, 1:] += rng.random((count, self.reuse - 1)) * spread * part
            return due

        position = np.arange(slots)
        due = lives(0, slots)
        served = np.zeros(slots, dtype=np.int64)
        last_batch = np.full(slots, -self.samples)
        alive = np.ones(slots, dtype=bool)
        admitted, outstanding = slots, self.samples * self.reuse
        gap = (self.buffer_batches + 1) // 2

        batch = 0
        while outstanding:
            size = min(self.batch_size, outstanding)
            uses_left = np.where(alive, self.reuse - served, 0)
            rested = batch - last_batch >= gap  # preferred, but not possible where the pass drains
            full_batches = outstanding // self.batch_size
            critical = np.where(uses_left >= full_batches, uses_left, 0)
            next_due = np.take_along_axis(due, np.minimum(served, self.reuse - 1)[:, None], 1)[:, 0]
            ranked = np.lexsort((next_due, ~rested, -critical, ~alive))
            chosen = ranked[:size]
            assert alive[chosen].all(), f"rolling order ran out of samples: {self}"
            if self.shuffle:
                chosen = rng.permutation(chosen)
            yield Serve(position[chosen].copy(), served[chosen].copy())

            served[chosen] += 1
            last_batch[chosen] = batch
            outstanding -= size
            batch += 1
            leaving = np.sort(chosen[served[chosen] == self.reuse])
            entering = leaving[: self.samples - admitted]
            alive[leaving] = False
            if len(entering):
                position[entering] = np.arange(admitted, admitted + len(entering))
                due[entering] = lives(admitted, len(entering))
                served[entering] = 0
                last_batch[entering] = -self.samples
                alive[entering] = True
                admitted += len(entering)


def batches_per_pass(samples: int, batch_size: int, reuse: int, mode: Mode, drop_last: bool) -> int:
    """How many batches one pass serves. It is the `len()` of the loader."""

    def count(items: int) -> int:
        return items // batch_size if drop_last else -(-items // batch_size)

    return reuse * count(samples) if mode == "immediate" else count(samples * reuse)
