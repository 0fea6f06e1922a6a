"""The arenas of a plan as real memory: those of the devices, and the host's.

    region   [..|64-aligned .....................................]
                      |<- place ->|  -> an address, or a storage of exactly these bytes

A tensor that leaves the runner (a parameter, an optimizer's state) gets a storage of its own size
over the arena's bytes: saving it to a file saves it alone, and not the arena.

    kernels on     DeviceArena                            HostArena
    cpu            this machine's memory                  the same, or a file (file_memory.py)
    cuda           one allocation of PyTorch's on each    page-locked (pinned_arena.py)

The two are apart because they have two owners: a device's arena is lent to one job after the
other, and every job keeps its own arena on the host.
"""

import mmap
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import CDLL, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from offload.errors import OffloadError
from offload.graph.memgraph import ALIGNMENT, Place
from offload.graph.taskgraph import HOST
from offload.memory.file_memory import map_file
from offload.memory.pinned_arena import PinnedArena, cuda_runtime
from offload.program.kernels import CPU, Value
from offload.sizes import format_size


class ArenaMemory:
    """The memory of one arena: one piece, taken at once and freed with its last view."""

    def __init__(self, memory: "memoryview | torch.Tensor", nbytes: int) -> None:
        self._memory = memory
        self.nbytes = nbytes
        self.tensor = _view_bytes(memory, 0, nbytes)
        self.begin = self.tensor.data_ptr()

    def contains(self, address: int) -> bool:
        return self.begin <= address < self.begin + self.nbytes

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """These bytes alone, in a storage of their own."""
        return _view_bytes(self._memory, offset, nbytes)

    def part(self, nbytes: int) -> "ArenaMemory":
        """The first bytes of it, as an arena of their own."""
        return ArenaMemory(self._memory[:nbytes], nbytes)

    def give_back(self, keep: Iterable[Place]) -> None:
        """Whole pages go back to the machine, but for those of `keep`. A device's arena stays
        until it is freed as a whole."""
        if self.tensor.device.type != "cpu":
            return
        at = self.begin
        for place in sorted(keep, key=lambda place: place.offset):
            start = self.begin + place.offset
            _give_back(at, start)
            at = max(at, start + place.nbytes)
        _give_back(at, self.begin + self.nbytes)


class DeviceArena:
    """The memory of a stage's device, lent to one job at a time. A graph may use several devices:
    their regions are numbered."""

    def __init__(
        self,
        sizes: Mapping[int, int],
        device: torch.device = CPU,
        host_dir: Path | None = None,
    ) -> None:
        """`device`: where kernels run; of a graph over several, region 0's. `host_dir`: where
        what is lent waits; see `HostArena`."""
        self.device, self.host_dir = device, host_dir
        self._loan: Loan | None = None
        give_cached_back(device)
        self.regions: Mapping[int, ArenaMemory] = MappingProxyType(
            {number: ArenaMemory(self._allocate(number, n), n) for number, n in sizes.items()}
        )

    @contextmanager
    def lend(self, sizes: Mapping[int, int]) -> Iterator["DeviceArena"]:
        """Lend the first bytes of every region in this block. They are kept on the host meanwhile,
        and are afterwards what they were. The same sizes have the same arena every time."""
        if self._loan is None or self._loan.part.sizes != dict(sizes):
            self._loan = Loan.of_arena(self, sizes)
        self._loan.keep()
        try:
            yield self._loan.part
        finally:
            self._loan.bring_back()

    def copies_of(self, sizes: Mapping[int, int]) -> "OutCopies":
        """Take room on the host for the first bytes of every region."""
        return OutCopies(Loan.of_arena(self, sizes))

    def _allocate(self, number: int, nbytes: int) -> "memoryview | torch.Tensor":
        if self.device.type == "cpu":
            return _allocate_aligned(number, nbytes)
        return _allocate_on_device(number, nbytes, number_device(self.device, number))

    def synchronize(self) -> None:
        """Wait until nothing runs on any of the devices."""
        for device in {self.device, *(each.tensor.device for each in self.regions.values())}:
            synchronize(device)

    @property
    def sizes(self) -> dict[int, int]:
        return {number: region.nbytes for number, region in self.regions.items()}

    def holds(self, sizes: Mapping[int, int]) -> bool:
        """Whether every region is there and large enough."""
        for number, nbytes in sizes.items():
            if number not in self.regions or self.regions[number].nbytes < nbytes:
                return False
        return True


class HostArena:
    """The memory that a job keeps on the host. For a CUDA device it is page-locked."""

    def __init__(
        self, nbytes: int, device: torch.device = CPU, host_dir: Path | None = None
    ) -> None:
        """`host_dir`: a folder for a file that is this memory; only where kernels run on the CPU,
        because pages of a file are not locked."""
        self._pinned: PinnedArena | None = None
        self._serves = "cpu" if device.type == "cpu" else "any"
        if device.type == "cpu" or not nbytes:
            in_file = map_file(host_dir, nbytes) if host_dir and nbytes else None
            self.region = ArenaMemory(in_file or _allocate_aligned(HOST, nbytes), nbytes)
            return
        self._pinned = PinnedArena(nbytes, cuda_runtime(device))
        self.region = ArenaMemory(self._pinned.bytes, nbytes)

    @property
    def note(self) -> str:
        """Why the memory is not page-locked; empty where it is, or need not be."""
        return self._pinned.why_not if self._pinned else ""

    def serves(self, nbytes: int, device: torch.device) -> bool:
        """Whether so much of a plan for this device could lie here. Locked pages serve any."""
        return self.region.nbytes >= nbytes and self._serves in (device.type, "any")

    def unlock(self) -> None:
        """Locked pages cannot be given back. Safe to call again."""
        if self._pinned:
            self._pinned.close()


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """The first bytes of an arena, for a borrower, and the room on the host where they wait."""

    part: DeviceArena
    room: HostArena

    @classmethod
    def of_arena(cls, arena: DeviceArena, sizes: Mapping[int, int]) -> "Loan":
        part = DeviceArena({}, arena.device, arena.host_dir)
        part.regions = MappingProxyType({n: arena.regions[n].part(sizes[n]) for n in sizes})
        return cls(part, HostArena(sum(sizes.values()), arena.device, arena.host_dir))

    def keep(self) -> None:
        for device, host in self._pairs():
            host.copy_(device, non_blocking=True)
        self.part.synchronize()

    def bring_back(self) -> None:
        self.part.synchronize()  # the borrower's kernels may still run
        for device, host in self._pairs():
            device.copy_(host, non_blocking=True)
        self.part.synchronize()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        for region in self.part.regions.values():
            yield region.tensor, self.room.region.bytes(at, region.nbytes)
            at += region.nbytes


class OutCopies:
    """The first bytes of an arena, which wait on the host while others use the arena."""

    def __init__(self, loan: Loan) -> None:
        self._loan = loan
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._used = False

    def make(self) -> None:
        """Copy the bytes out. Whoever wants the arena meanwhile waits for this."""
        try:
            self._loan.keep()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._over.set()

    def wait(self) -> None:
        """Return when the arena may be written to. Raise if the bytes could not be copied."""
        self._over.wait()
        if self._error is not None:
            raise OffloadError(
                f"the arena is not free: what a step has there could not be copied to the host"
                f" ({self._error})"
            ) from self._error
        self._used = True

    def bring_back(self) -> None:
        """Copy them back if anybody had the arena, and give the room back."""
        if self._used:
            self._loan.bring_back()
        self._loan.room.unlock()


class Arenas:
    """The device's arena and the host's as one address space of `Place`s, for one job."""

    def __init__(
        self, lent: DeviceArena, host: HostArena, origins: dict[str, torch.device] | None = None
    ) -> None:
        """`origins`: where each tensor of the user's was before it came here, by its name."""
        self.device = lent.device
        self.lent = lent
        self.host = host
        self.origins = {} if origins is None else origins
        self._regions = {HOST: host.region, **lent.regions}
        self.tensors = MappingProxyType({n: region.tensor for n, region in self._regions.items()})

    @classmethod
    def allocate(cls, sizes: Mapping[int, int], device: torch.device = CPU) -> "Arenas":
        """Allocate both. `sizes`: bytes by device, and of the host."""
        on_device = {number: nbytes for number, nbytes in sizes.items() if number != HOST}
        return cls(DeviceArena(on_device, device), HostArena(sizes.get(HOST, 0), device))

    def without_device(self) -> "Arenas":
        """The host's arena alone: nothing of it refers to the device's."""
        return Arenas(DeviceArena({}, self.device), self.host, self.origins)

    @property
    def sizes(self) -> dict[int, int]:
        return {number: region.nbytes for number, region in self._regions.items()}

    @property
    def note(self) -> str:
        """What a person should know of them; mostly nothing."""
        return self.host.note

    def address(self, place: Place) -> int:
        return self._regions[place.arena].begin + place.offset

    def contain(self, address: int) -> bool:
        return any(region.contains(address) for region in self._regions.values())

    def synchronize(self) -> None:
        """Wait until no copy runs: before the host itself touches bytes that one may still move."""
        self.lent.synchronize()

    def forget(self, keep: Iterable[Place], *, lent: bool = True) -> None:
        """Give memory back to the machine, but for these places, when no step comes any more.
        `lent`: whether the device's arena is this job's now; it may hold another's tensors."""
        keep = tuple(keep)
        self.synchronize()
        self.host.unlock()
        for number, region in self._regions.items():
            if number == HOST or lent:
                region.give_back(place for place in keep if place.arena == number)

    def bytes(self, place: Place) -> torch.Tensor:
        """These bytes alone, in a storage of their own."""
        return self._regions[place.arena].bytes(place.offset, place.nbytes)

    def view(self, place: Place, value: Value) -> torch.Tensor:
        """The tensor over a buffer that lies at `place`."""
        memory = self.bytes(place)
        empty = torch.empty(0, dtype=value.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), value.offset, value.size, value.stride)


def _give_back(begin: int, end: int) -> None:
    """Free the whole pages between two addresses. Their contents are lost."""
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and sys.platform == "linux":
        madvise = CDLL(None).madvise
        madvise.argtypes = c_void_p, c_size_t, c_int
        madvise(begin, end - begin, mmap.MADV_DONTNEED)  # if it is refused, nothing is saved


def synchronize(device: torch.device) -> None:
    """Wait until nothing runs on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_cached_back(device: torch.device) -> None:
    """Give the device back what PyTorch has cached and nobody uses."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def number_device(device: torch.device, arena: int) -> torch.device:
    """The device of an arena. `device`: that of arena 0."""
    if not arena:
        return device
    return torch.device(device.type, (device.index or 0) + arena)


def _allocate_aligned(arena: int, size: int) -> memoryview:
    try:
        raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    except (MemoryError, RuntimeError) as error:
        raise _refusal(arena, size) from error
    start = -raw.data_ptr() % ALIGNMENT
    memory: Any = raw.numpy()  # a buffer, which its type does not say in Python 3.11
    return memoryview(memory)[start : start + size]


def _allocate_on_device(arena: int, size: int, device: torch.device) -> torch.Tensor:
    """PyTorch aligns it to 512 bytes."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise _refusal(arena, size) from error


def _refusal(arena: int, size: int) -> OffloadError:
    whose = "the host" if arena == HOST else f"device {arena}"
    remedy = "give a host_budget" if arena == HOST else "lower the budget"
    return OffloadError(
        f"{size} bytes ({format_size(size)}) for the arena of {whose} were refused by this"
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


def _view_bytes(memory: "memoryview | torch.Tensor", offset: int, nbytes: int) -> torch.Tensor:
    if isinstance(memory, torch.Tensor):
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=memory.device)
        return torch.as_tensor(_Exported(memory, offset, nbytes), device=memory.device)
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
