"""The arenas of a plan as real memory: one piece of it a device, one for the host.

    raw   [..|64-aligned: arena of device 0 ...................]
                      |<- place ->|  -> an address, or a storage of exactly these bytes

A tensor that leaves the runner (a parameter, an optimizer's state) gets a storage of its own size
over the arena's bytes: saving it to a file saves it alone, and not the arena.

    kernels on     device arenas                          host arena
    cpu            this machine's memory                  the same
    cuda           one allocation of PyTorch's on each    page-locked (pinned.py)
"""

import mmap
import sys
from collections.abc import Iterable, Mapping
from ctypes import CDLL, c_int, c_size_t, c_void_p
from types import MappingProxyType
from typing import Any

import torch

from offload.errors import OffloadError
from offload.kernels import CPU, Value
from offload.memgraph import ALIGNMENT, Place
from offload.pinned import Pinned, cuda_runtime
from offload.sizes import say_size
from offload.taskgraph import HOST


class Arenas:
    """`sizes`: bytes by device, and of the host. Allocated at once, freed with the last view."""

    def __init__(self, sizes: Mapping[int, int], device: torch.device = CPU) -> None:
        """`device`: where kernels run; of a graph over several, arena 0's."""
        self.sizes = MappingProxyType({HOST: 0} | dict(sizes))
        self.device = device
        self.origins: dict[str, torch.device] = {}
        """Where a tensor of the user's was before it came here, by its name."""
        self._pinned: Pinned | None = None
        give_cached_back(device)
        self._bytes = {arena: self._taken(arena, size) for arena, size in self.sizes.items()}
        self.tensors = MappingProxyType(
            {arena: _over(memory, 0, self.sizes[arena]) for arena, memory in self._bytes.items()}
        )
        self._begins = {arena: tensor.data_ptr() for arena, tensor in self.tensors.items()}

    def _taken(self, arena: int, size: int) -> "memoryview | torch.Tensor":
        if self.device.type == "cpu" or (arena == HOST and not size):
            return _aligned(arena, size)
        if arena != HOST:
            return _on_device(arena, size, _numbered(self.device, arena))
        from offload.machine import memory_left  # it knows plans, and those know arenas

        self._pinned = Pinned(size, cuda_runtime(self.device), memory_left)
        return self._pinned.bytes

    @property
    def note(self) -> str:
        """What a person should know of them; mostly nothing."""
        return self._pinned.why_not if self._pinned else ""

    def hold(self, sizes: Mapping[int, int]) -> bool:
        """Are they large enough?"""
        return all(self.sizes.get(arena, -1) >= size for arena, size in sizes.items())

    def address(self, place: Place) -> int:
        return self._begins[place.arena] + place.offset

    def contain(self, address: int) -> bool:
        return any(
            begin <= address < begin + self.sizes[arena] for arena, begin in self._begins.items()
        )

    def rest(self) -> None:
        """Until no copy runs: before the host itself touches bytes that one may still move."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget(self, keep: Iterable[Place]) -> None:
        """Give memory back to the machine, but for these places; when no step comes any more."""
        keep = tuple(keep)
        self.rest()
        if self._pinned:
            self._pinned.close()  # locked pages do not go
        for arena, begin in self._begins.items():
            if self.tensors[arena].device.type != "cpu":
                continue  # it goes as a whole
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
        memory = self.bytes(place)
        empty = torch.empty(0, dtype=value.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), value.offset, value.size, value.stride)


def _give_back(begin: int, end: int) -> None:
    """Whole pages between two addresses: what is in them is gone, and they take no memory."""
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and sys.platform == "linux":
        madvise = CDLL(None).madvise
        madvise.argtypes = c_void_p, c_size_t, c_int
        madvise(begin, end - begin, mmap.MADV_DONTNEED)  # refused, it only saves nothing


def give_cached_back(device: torch.device) -> None:
    """What PyTorch keeps for later and nobody uses: to whoever asks the device next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _numbered(device: torch.device, arena: int) -> torch.device:
    return torch.device(device.type, (device.index or 0) + arena)


def _aligned(arena: int, size: int) -> memoryview:
    try:
        raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    except (MemoryError, RuntimeError) as error:
        raise _refused(arena, size) from error
    start = -raw.data_ptr() % ALIGNMENT
    memory: Any = raw.numpy()  # a buffer, which its type does not say in Python 3.11
    return memoryview(memory)[start : start + size]


def _on_device(arena: int, size: int, device: torch.device) -> torch.Tensor:
    """PyTorch aligns it to 512 bytes."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise _refused(arena, size) from error


def _refused(arena: int, size: int) -> OffloadError:
    whose = "the host" if arena == HOST else f"device {arena}"
    remedy = "give a host_budget" if arena == HOST else "lower the budget"
    return OffloadError(
        f"{size} bytes ({say_size(size)}) for the arena of {whose} were refused by this"
        f" machine: {remedy}, make the batch smaller, or end what else uses memory"
    )


class _Exported:
    """Bytes of a tensor on a CUDA device, as others take memory over: a storage of their own, that
    keeps the whole alive."""

    def __init__(self, memory: torch.Tensor, offset: int, nbytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr() + offset, False),
            "strides": None,
            "version": 2,
        }


def _over(memory: "memoryview | torch.Tensor", offset: int, nbytes: int) -> torch.Tensor:
    if isinstance(memory, torch.Tensor):
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=memory.device)
        return torch.as_tensor(_Exported(memory, offset, nbytes), device=memory.device)
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
