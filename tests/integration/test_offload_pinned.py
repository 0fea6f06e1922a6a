"""One page-locked mapping of exactly its size: what becomes of it when the system says no."""

import gc
import mmap
import os
import struct
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from offload.errors import MemoryTooSmall
from offload.memory import pinned_arena
from offload.memory.host_memory import HostMemoryLeft
from offload.memory.pinned_arena import PORTABLE, PinnedArena, Runtime, cuda_runtime

MAPS = Path("/proc/self/maps")
NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ("cpu", pytest.param("cuda", marks=(pytest.mark.gpu, NO_DEVICE)))


@dataclass
class Fake:
    """Plays CUDA's runtime: an error code to answer with, and what it was asked."""

    refuses: int = 0
    keeps: int = 0
    locked: dict[int, int] = field(default_factory=dict)
    remembered: int = 0
    calls: list[str] = field(default_factory=list)

    def register(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == PORTABLE
        self.calls.append("register")
        self.remembered = self.refuses
        if not self.refuses:
            self.locked[address] = nbytes
        return self.refuses

    def unregister(self, address: int) -> int:
        self.calls.append("unregister")
        self.remembered = self.keeps
        if not self.keeps:
            del self.locked[address]
        return self.keeps

    def forget(self) -> None:
        self.remembered = 0

    def runtime(self) -> Runtime:
        return Runtime(
            self.register, self.unregister, lambda code: f"error number {code}", self.forget
        )


def tensor(pinned: PinnedArena) -> torch.Tensor:
    return torch.frombuffer(pinned.bytes, dtype=torch.uint8)


def test_exactly_its_size_is_locked_in_one_piece_and_given_back_once() -> None:
    fake = Fake()
    odd = 3 * mmap.PAGESIZE + 100
    pinned = PinnedArena(odd, fake.runtime())
    memory = tensor(pinned)
    assert len(memory) == odd
    assert fake.locked == {memory.data_ptr(): odd}
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert pinned.locked
    assert not pinned.why_not
    pinned.close()
    pinned.close()
    assert not pinned.locked
    assert fake.calls == ["register", "unregister"]
    memory.fill_(7)  # ordinary memory from now on
    assert int(memory.sum()) == 7 * odd


def test_a_refusal_is_told_once_and_leaves_ordinary_memory() -> None:
    fake = Fake(refuses=2)
    with pytest.warns(RuntimeWarning, match=r"CUDA error 2: error number 2") as told:
        pinned = PinnedArena(1 << 20, fake.runtime())
    assert len(told) == 1
    assert "ulimit -l" in pinned.why_not
    assert "copies between host and device are slower" in pinned.why_not
    assert "1.0 MiB" in pinned.why_not
    assert fake.remembered == 0  # or the next kernel would be blamed
    assert not pinned.locked
    tensor(pinned).fill_(1)
    pinned.close()
    assert fake.calls == ["register"]


def test_one_that_is_dropped_is_unlocked_before_its_memory_goes() -> None:
    fake = Fake()
    pinned = PinnedArena(mmap.PAGESIZE, fake.runtime())
    gone = weakref.ref(pinned)
    del pinned
    gc.collect()
    assert gone() is None
    assert fake.calls == ["register", "unregister"]
    assert not fake.locked


def test_memory_that_cannot_be_unlocked_is_told_and_stays() -> None:
    fake = Fake(keeps=4)
    pinned = PinnedArena(mmap.PAGESIZE, fake.runtime())
    with pytest.warns(RuntimeWarning, match="could not be unlocked .CUDA error 4"):
        pinned.close()
    pinned.close()
    assert fake.calls == ["register", "unregister"]
    assert fake.remembered == 0


def test_more_than_there_is_left_is_refused_before_anything_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Fake()
    with pytest.raises(MemoryTooSmall, match="the limit of this group") as told:
        monkeypatch.setattr(
            pinned_arena, "memory_left", lambda: HostMemoryLeft(1024, "the limit of this group")
        )
        PinnedArena(2048, fake.runtime())
    assert (told.value.needed, told.value.left) == (2048, 1024)
    assert not fake.calls


def mapped(address: int) -> bool:
    """In this process."""
    for line in MAPS.read_text(encoding="ascii").splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


def in_a_child(memory: torch.Tensor) -> tuple[int, int] | None:
    """Of a forked process: the first and last value there, then it writes. None: it has not got
    this memory."""
    out, back = os.pipe()
    child = os.fork()
    if not child:
        try:
            if mapped(memory.data_ptr()):
                found = int(memory[0]), int(memory[-1])
                memory[:100] = 9
                os.write(back, struct.pack("2q", *found))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(back)
    with open(out, "rb") as told:
        read = told.read()
    return struct.unpack("2q", read) if read else None


@pytest.mark.skipif(not MAPS.is_file(), reason="needs /proc/self/maps")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_a_forked_process_has_not_got_what_is_locked(device: str) -> None:
    """It would get one of every byte, at every fork."""
    nbytes = 32 << 20
    runtime = Fake().runtime() if device == "cpu" else cuda_runtime(torch.device(device))
    pinned = PinnedArena(nbytes, runtime)
    assert pinned.locked
    memory = tensor(pinned)
    memory.fill_(7)
    assert in_a_child(memory) is None
    assert int(memory.min()) == int(memory.max()) == 7
    assert mapped(memory.data_ptr())
    pinned.close()  # ordinary memory from now on
    assert in_a_child(memory) == (7, 7)
    assert int(memory.min()) == 7
