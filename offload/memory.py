"""The arenas of a plan as real memory: one piece of it a device, one for the host.

    raw   [..|64-aligned: arena of device 0 ...................]
                      |<- place ->|  -> an address, or a storage of exactly these bytes

A tensor that leaves the runner (a parameter, an optimizer's state) gets a storage of its own size
over the arena's bytes: saving it to a file saves it alone, and not the arena.
"""

import mmap
import sys
from collections.abc import Iterable, Mapping
from ctypes import CDLL, c_int, c_size_t, c_void_p
from types import MappingProxyType
from typing import Any

import torch

from offload.errors import OffloadError
from offload.kernels import Value
from offload.memgraph import ALIGNMENT, Place
from offload.sizes import say_size
from offload.taskgraph import HOST


class Arenas:
    """`sizes`: bytes by device, and of the host. Allocated at once, freed with the last view."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes = MappingProxyType({HOST: 0} | dict(sizes))
        self._bytes = {arena: _aligned(arena, size) for arena, size in self.sizes.items()}
        self.tensors = MappingProxyType(
            {arena: _over(memory, 0, len(memory)) for arena, memory in self._bytes.items()}
        )
        self._begins = {arena: tensor.data_ptr() for arena, tensor in self.tensors.items()}

    def hold(self, sizes: Mapping[int, int]) -> bool:
        """Are they large enough?"""
        return all(self.sizes.get(arena, -1) >= size for arena, size in sizes.items())

    def address(self, place: Place) -> int:
        return self._begins[place.arena] + place.offset

    def contain(self, address: int) -> bool:
        return any(
            begin <= address < begin + self.sizes[arena] for arena, begin in self._begins.items()
        )

    def forget(self, keep: Iterable[Place]) -> None:
        """Give memory back to the machine, but for these places; when no step comes any more."""
        keep = tuple(keep)
        for arena, begin in self._begins.items():
            at = begin
            kept = sorted((self.address(p), p.nbytes) for p in keep if p.arena == arena)
            for start, nbytes in kept:
                _give_back(at, start)
                at = max(at, start + nbytes)
            _give_back(at, begin + self.sizes[arena])

    def bytes(self, place: Place) -> torch.Tensor:
        """They alone, in a storage of their own."""
        return _over(self._bytes[place.arena], place.offset, place.nbytes)

    def view(self, place: Place, value: Value) -> torch.Tensor:
        """The tensor over a buffer that lies at `place`."""
        empty = torch.empty(0, dtype=value.dtype)
        storage = self.bytes(place).untyped_storage()
        return empty.set_(storage, value.offset, value.size, value.stride)


def _give_back(begin: int, end: int) -> None:
    """Whole pages between two addresses: what is in them is gone, and they take no memory."""
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and sys.platform == "linux":
        madvise = CDLL(None).madvise
        madvise.argtypes = c_void_p, c_size_t, c_int
        madvise(begin, end - begin, mmap.MADV_DONTNEED)  # refused, it only saves nothing


def _aligned(arena: int, size: int) -> memoryview:
    try:
        raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    except (MemoryError, RuntimeError) as error:
        whose = "the host" if arena == HOST else f"device {arena}"
        remedy = "give a host_budget" if arena == HOST else "lower the budget"
        raise OffloadError(
            f"{size} bytes ({say_size(size)}) for the arena of {whose} were refused by this"
            f" machine: {remedy}, make the batch smaller, or end what else uses memory"
        ) from error
    start = -raw.data_ptr() % ALIGNMENT
    memory: Any = raw.numpy()  # a buffer, which its type does not say in Python 3.11
    return memoryview(memory)[start : start + size]


def _over(memory: memoryview, offset: int, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
