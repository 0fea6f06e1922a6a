"""Shared memory that carries batches from one process to another, and is used again.

    batch -> pack -> Parcel: pickled nest, where each tensor and array lies     a few hundred bytes
                 '-> write:  | tensor, tensor | array | ...                |    the shared memory
    Parcel + memory -> unpack -> the batch, over that memory, without a copy

A block is a nameless file in memory: no kill leaves anything behind, and /dev/shm does not limit
it. `LentBlocks` makes those of one consumer, whose `BorrowedBlocks` map them. A block belongs to
the consumer's batch while anything over it lives, which its reference count tells.
"""

import io
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
import torch

from loaders.blocks import ONLY_LISTED
from loaders.errors import SharingError
from loaders.slots.leaves import as_kind, attributes_of, kind_of

HELD = 4
"""A consumer holds so many batches without a copy; a loop holds two, and one is looked ahead."""


ALIGNMENT = 64
WIDEST = 16
"""The bytes of the largest number that a tensor has: a complex one."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A batch without its pixels."""

    nest: bytes
    storages: dict[int, tuple[int, int, int]]
    """By the address of each storage of tensors: where its bytes lie in the shared memory, from
    which of its bytes on, and how many."""
    arrays: list[tuple[int, int]]
    """Where the buffers lie that are no tensors', and how many bytes they have."""
    nbytes: int
    """How much shared memory it takes."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A parcel, and what is to be written into its memory."""

    parcel: Parcel
    parts: Sequence[tuple[int, Any]]
    """Where bytes are to be written, and the bytes."""

    def write(self, area: mmap) -> None:
        """Write the pixels into the shared memory."""
        for start, source in self.parts:
            if source.nbytes:
                # Torch would copy with a team of threads for each consumer, which wait for each
                # other.
                there = np.frombuffer(area, np.uint8, source.nbytes, start)
                np.copyto(there, np.frombuffer(source, np.uint8))


def pack(batch: Any) -> PackedBatch:
    """Return a batch in a form that can be sent. It must not change before it was written."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    packer = _Packer(file, protocol=5, buffer_callback=buffers.append)
    try:
        packer.dump(batch)
    except Exception as error:
        raise SharingError(
            f"a batch holds something that cannot be sent to another process: {error}; give its"
            " consumer a view() in the process of the stream, or leave that out of the samples"
        ) from error
    parts: list[tuple[int, Any]] = []
    end = 0
    for source in (*packer.memory(), *(buffer.raw() for buffer in buffers)):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        parts.append((start, source))
        end = start + source.nbytes
    storages = {
        address: (start, first, source.nbytes)
        for (address, (_, first, _)), (start, source) in zip(
            packer.used.items(), parts, strict=False
        )
    }
    arrays = [(start, source.nbytes) for start, source in parts[len(storages) :]]
    return PackedBatch(Parcel(file.getvalue(), storages, arrays, end), parts)


def unpack(parcel: Parcel, area: mmap | bytearray) -> Any:
    """Return the batch, over `area`, which it keeps as long as anybody holds a part of it."""
    whole = memoryview(area)
    arrays = [whole[start : start + nbytes] for start, nbytes in parcel.arrays]
    try:
        with torch.inference_mode(False):
            return _Unpacker(parcel, area, arrays).load()
    except Exception as error:
        raise SharingError(
            f"a batch holds something that cannot be rebuilt in this process: {error}; its classes"
            " must be in modules that can be imported here"
        ) from error


class _Packer(pickle.Pickler):
    """Says where the tensors of a batch lie instead of pickling them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.used: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        """By the address of a storage: from which byte up to which tensors use it."""
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, torch.Tensor) or obj.device.type != "cpu":
            return None
        if obj.layout is not torch.strided or obj.requires_grad or obj.is_quantized:
            return None
        if obj.is_conj() or obj.is_neg():
            return None
        address, first, last = _reach(obj)
        _, *known = self.used.get(address, (None, first, last))
        self.used[address] = obj.untyped_storage(), min(first, known[0]), max(last, known[1])
        number = self._numbers.setdefault(id(obj), len(self._numbers))
        offset = int(obj.storage_offset()) if obj.numel() else 0
        kind = kind_of(obj)
        attributes = {} if kind is None else {**attributes_of(obj)}
        return number, address, obj.dtype, offset, tuple(obj.shape), obj.stride(), kind, attributes

    def memory(self) -> list[Any]:
        """Return the bytes that are used, storage by storage."""
        return [
            torch.empty(0, dtype=torch.uint8).set_(storage, first, (last - first,), (1,)).numpy()
            for storage, first, last in self.used.values()
        ]


class _Unpacker(pickle.Unpickler):
    """Makes the tensors of a parcel over its memory."""

    def __init__(self, parcel: Parcel, area: mmap | bytearray, arrays: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(parcel.nest), buffers=arrays)
        self._storages = {
            address: (_storage(area, start, nbytes), first)
            for address, (start, first, nbytes) in parcel.storages.items()
        }
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, address, dtype, offset, shape, strides, kind, attributes = pid
        if number not in self._made:
            storage, first = self._storages[address]
            made = torch.empty(0, dtype=dtype)
            made.set_(storage, offset - first // dtype.itemsize, shape, strides)
            self._made[number] = as_kind(made, kind, attributes)
        return self._made[number]


def _reach(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of a tensor's storage, and from which byte up to which it uses it."""
    if not tensor.numel():
        return 0, 0, 0
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((size - 1) * stride for size, stride in steps)
    # Tensors of other dtypes may begin in the part, so it begins where any of them could.
    begin = first * tensor.itemsize // WIDEST * WIDEST
    return tensor.untyped_storage().data_ptr(), begin, (last + 1) * tensor.itemsize


def _storage(area: mmap | bytearray, start: int, nbytes: int) -> torch.UntypedStorage:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    part = torch.frombuffer(area, dtype=torch.uint8, count=nbytes, offset=start)
    return part.untyped_storage()


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
