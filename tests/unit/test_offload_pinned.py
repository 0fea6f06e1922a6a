"""One page-locked mapping of exactly its size: what becomes of it when the system says no."""

import gc
import mmap
import os
import resource
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from offload.errors import MemoryTooSmall
from offload.machine import Left
from offload.pinned import PORTABLE, Pinned, Runtime

PLENTY = Left(1 << 40, "plenty")


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


def tensor(pinned: Pinned) -> torch.Tensor:
    return torch.frombuffer(pinned.bytes, dtype=torch.uint8)


def test_exactly_its_size_is_locked_in_one_piece_and_given_back_once() -> None:
    fake = Fake()
    odd = 3 * mmap.PAGESIZE + 100
    pinned = Pinned(odd, fake.runtime(), lambda: PLENTY)
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
        pinned = Pinned(1 << 20, fake.runtime(), lambda: PLENTY)
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
    pinned = Pinned(mmap.PAGESIZE, fake.runtime(), lambda: PLENTY)
    gone = weakref.ref(pinned)
    del pinned
    gc.collect()
    assert gone() is None
    assert fake.calls == ["register", "unregister"]
    assert not fake.locked


def test_a_view_that_outlives_it_is_still_memory() -> None:
    fake = Fake()
    pinned = Pinned(mmap.PAGESIZE, fake.runtime(), lambda: PLENTY)
    view = tensor(pinned)
    pinned.close()
    del pinned
    gc.collect()
    view.fill_(3)
    assert int(view[-1]) == 3


def test_memory_that_cannot_be_unlocked_is_told_and_stays() -> None:
    fake = Fake(keeps=4)
    pinned = Pinned(mmap.PAGESIZE, fake.runtime(), lambda: PLENTY)
    with pytest.warns(RuntimeWarning, match="could not be unlocked .CUDA error 4"):
        pinned.close()
    pinned.close()
    assert fake.calls == ["register", "unregister"]
    assert fake.remembered == 0


def test_more_than_there_is_left_is_refused_before_anything_is_mapped() -> None:
    fake = Fake()
    with pytest.raises(MemoryTooSmall, match="the limit of this group") as told:
        Pinned(2048, fake.runtime(), lambda: Left(1024, "the limit of this group"))
    assert (told.value.needed, told.value.left) == (2048, 1024)
    assert not fake.calls


def test_what_the_machine_refuses_to_map_is_told_with_its_words() -> None:
    fake = Fake()
    with pytest.raises(MemoryTooSmall, match="were refused by this machine"):
        Pinned(1 << 60, fake.runtime(), lambda: Left(1 << 62, "a dream"))
    assert not fake.calls


def test_nothing_is_locked_for_an_arena_of_no_bytes() -> None:
    fake = Fake()
    pinned = Pinned(0, fake.runtime(), lambda: Left(0, "nothing"))
    pinned.close()
    assert not fake.calls
    assert len(pinned.bytes) == 0


def test_no_power_of_two_is_taken() -> None:
    """The address space grows by what was asked, and a page."""

    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    if os.name != "posix" or not Path("/proc/self/statm").is_file():
        pytest.skip("needs /proc")
    nbytes = (1 << 30) + 12345
    before = mapped()
    pinned = Pinned(nbytes, Fake().runtime(), lambda: PLENTY)
    assert mapped() - before < nbytes + (1 << 22)
    pinned.close()
