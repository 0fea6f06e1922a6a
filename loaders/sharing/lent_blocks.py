"""Shared memory that carries batches from one process to another, and is used again.

A block is a nameless file in memory: no kill leaves anything behind, and /dev/shm does not limit
it. `LentBlocks` makes those of one consumer, whose `BorrowedBlocks` map them. A block belongs to
the consumer's batch while anything over it lives, which its reference count tells.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

from loaders.blocks import ONLY_LISTED
from loaders.sharing.parcels import PackedBatch, Parcel, unpack

HELD = 4
"""A consumer holds so many batches without a copy; a loop holds two, and one is looked ahead."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """A batch on its way."""

    parcel: Parcel
    block: int | None
    """The block that it lies in. None: it takes no memory."""
    new_bytes: int
    """The size of a block that is new to the consumer, whose descriptor is sent next. Else 0."""
    dropped: Sequence[int]
    """The blocks that are used no more."""


class LentBlocks:
    """The blocks of one consumer."""

    def __init__(self) -> None:
        self._areas: dict[int, mmap] = {}
        self._idle: list[int] = []
        self._made = 0

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._areas.values()))

    def ship(self, packed: PackedBatch) -> tuple[Shipment, int | None]:
        """Write a batch into a block. Returns what to send of it, and the descriptor of a block
        that the consumer does not know yet, which whoever sends it closes."""
        parcel, nbytes = packed.parcel, packed.parcel.nbytes
        if not nbytes:
            return Shipment(parcel, None, 0, ()), None
        for number in self._idle:
            if nbytes <= len(self._areas[number]) <= 2 * nbytes:  # a last batch may be smaller
                self._idle.remove(number)
                packed.write(self._areas[number])
                return Shipment(parcel, number, 0, ()), None
        dropped, self._idle = tuple(self._idle), []  # they have another size
        for number in dropped:
            del self._areas[number]
        number, self._made = self._made, self._made + 1
        file = os.memfd_create("perfect-batch")
        try:
            os.fchmod(file, 0o600)
            os.ftruncate(file, nbytes)
            self._areas[number] = mmap(file, nbytes)
            packed.write(self._areas[number])
        except BaseException:
            os.close(file)
            raise
        return Shipment(parcel, number, nbytes, dropped), file

    def take_back(self, numbers: Sequence[int]) -> None:
        """Use these again: nobody holds them any longer."""
        self._idle += numbers


class BorrowedBlocks:
    """The blocks of `LentBlocks` as their consumer has them."""

    def __init__(self) -> None:
        self._areas: dict[int, mmap] = {}
        self._held: list[int] = []
        self._unused: list[int] = []

    def receive(self, shipment: Shipment, file: int | None) -> None:
        """Map the block of a shipment, if it is new. Its descriptor is closed."""
        for number in shipment.dropped:
            del self._areas[number]
        if file is None or shipment.block is None:
            return
        try:
            self._areas[shipment.block] = mmap(file, shipment.new_bytes)
        finally:
            os.close(file)

    def open(self, shipment: Shipment) -> Any:
        """Return the batch of a shipment."""
        parcel, number = shipment.parcel, shipment.block
        if number is None:
            return unpack(parcel, bytearray())
        self._look()
        if len(self._held) < HELD:
            self._held.append(number)
            return unpack(parcel, self._areas[number])
        self._unused.append(number)
        return unpack(parcel, bytearray(memoryview(self._areas[number])[: parcel.nbytes]))

    def leave(self, shipment: Shipment) -> None:
        """Let go of a batch that is not wanted."""
        if shipment.block is not None:
            self._unused.append(shipment.block)

    def returned(self) -> list[int]:
        """Return the blocks that nobody has held since this was asked last."""
        self._look()
        unused, self._unused = self._unused, []
        return unused

    def _look(self) -> None:
        areas = self._areas
        idle = [n for n in self._held if sys.getrefcount(areas[n]) == ONLY_LISTED]
        self._held = [n for n in self._held if n not in idle]
        self._unused += idle
