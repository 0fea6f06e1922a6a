"""A shuffle that is never stored: the id at a position is computed from a key.

    position --> (row, column) --> row += f(column) --> column += f(row) --> ... --> id
                 of a table of about sqrt(size) x sqrt(size) places

Each round can be undone, so all together are a permutation of the table (a Feistel network over two
numbers). Whoever lands on a place without an id moves on by the same rounds until it is on one
(cycle walking). Small sizes use a table of `LEAST_SIDE` x `LEAST_SIDE`, because few rounds reach
only some of the orders of a few ids. All numbers are integers of 64 bits that wrap around, so every
platform computes the same order (tests/property/test_keyed_permutation.py).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import overload

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 6
LEAST_SIDE = 16
HALF = np.uint64(32)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Odd numbers with bits set all over: the factors of the splitmix64 generator."""


def key_of(*words: int) -> int:
    """A key of 64 bits. Other words give an unrelated one."""
    return int.from_bytes(_bytes_of(words, 8), "little")


def shuffled(count: int, *words: int) -> IntArray:
    """The numbers 0, ..., `count` - 1 in an order that the words decide. They are all computed."""
    return np.argsort(mixed(np.arange(count), key_of(*words)), kind="stable")


def mixed(values: IntArray, key: int) -> Words:
    """For each value a number of 64 bits, in which every bit depends on all bits of both."""
    bits = values.astype(np.uint64) + np.uint64(key)
    for factor in (FIRST, SECOND):
        bits ^= bits >> HALF
        bits *= factor
    bits ^= bits >> HALF
    return bits


@dataclass(frozen=True, slots=True)
class KeyedPermutation:
    """A permutation of 0, ..., `size` - 1. Other words give another one."""

    size: int
    words: tuple[int, ...]
    _keys: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        data = _bytes_of(self.words, 8 * ROUNDS)
        keys = (data[8 * n : 8 * n + 8] for n in range(ROUNDS))
        object.__setattr__(self, "_keys", tuple(int.from_bytes(key, "little") for key in keys))

    def __call__(self, positions: IntArray) -> IntArray:
        """The ids at these positions."""
        walked = self._walked
        if self.size <= LEAST_SIDE**2:
            # A few ids in the least table are walked to often: its places are computed once.
            walked = self._walked(np.arange(LEAST_SIDE**2)).__getitem__
        ids = walked(np.asarray(positions, dtype=np.int64))
        while len(outside := np.flatnonzero(ids >= self.size)):
            ids[outside] = walked(ids[outside])
        return ids

    def _walked(self, places: IntArray) -> IntArray:
        """Where places of the table lie after all rounds."""
        rows = max(LEAST_SIDE, isqrt(max(self.size - 1, 0)) + 1)
        columns = max(LEAST_SIDE, -(-self.size // rows))
        row, column = np.divmod(places, columns)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                row += _numbers_below(rows, column, key)
                row %= rows
            else:
                column += _numbers_below(columns, row, key)
                column %= columns
        return row * columns + column


def _numbers_below(limit: int, values: IntArray, key: int) -> IntArray:
    """For each value a number below a limit of at most 32 bits, (almost) all equally often."""
    bits = values.astype(np.uint64)
    bits += np.uint64(key)
    bits *= FIRST
    bits ^= bits >> HALF
    bits *= SECOND
    bits >>= HALF
    bits *= np.uint64(limit)
    bits >>= HALF
    return bits.view(np.int64)


def _bytes_of(words: tuple[int, ...], count: int) -> bytes:
    text = repr([int(word) for word in words])
    return hashlib.blake2b(text.encode(), digest_size=count).digest()


@dataclass(frozen=True, slots=True)
class SourceOrder:
    """Every `step`-th id of an order from its place `start` on: so many as `places` has. Behind its
    end the order begins anew."""

    samples: int
    permutation: KeyedPermutation | None
    """None: the ids come in their own order."""
    places: range

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, positions: IntArray) -> IntArray: ...
    @overload
    def __getitem__(self, positions: slice) -> "SourceOrder": ...
    def __getitem__(self, positions: IntArray | slice) -> "IntArray | SourceOrder":
        if isinstance(positions, slice):
            return replace(self, places=self.places[positions])
        ids = (self.places.start + positions * self.places.step) % self.samples
        return ids if self.permutation is None else self.permutation(ids)

    def __iter__(self) -> Iterator[int]:
        """All ids. It is for a few of them: they are computed at once."""
        return iter(self[np.arange(len(self))].tolist())


def source_order(
    samples: int,
    *,
    seed: int,
    pass_index: int,
    shuffle: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> SourceOrder:
    """The ids that `rank` serves in pass `pass_index`."""
    whole = samples_per_rank(samples, world_size) * world_size
    permutation = KeyedPermutation(samples, (seed, pass_index)) if shuffle else None
    return SourceOrder(samples, permutation, range(rank, whole, world_size))


def samples_per_rank(samples: int, world_size: int) -> int:
    return -(-samples // world_size)
