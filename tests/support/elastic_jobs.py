"""What members do in the tests of reducing: functions that a fresh process can import."""

import ctypes
import gc
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.elastic_groups import HOST, Deadline, Ended, Files, Told, always, left_over, tasks

from trainers.elastic.errors import FrameError, GroupBroken
from trainers.elastic.reducing.canonical import all_gather_bytes, reduce_in_order
from trainers.elastic.reducing.graveyard import Graveyard
from trainers.elastic.reducing.group import Group, GroupPlace, form_group

SIZES = (1, 2, 3, 5, 1000, 4099)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
BIG = 1 << 24


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * rank + size)
    floats = torch.randn(size, generator=made) * 10.0 ** (3 * rank)
    return (floats * 1000).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def reduces(group: Group, _: Told) -> list[bytes]:
    results: list[bytes] = []
    for dtype in DTYPES:
        for size in SIZES:
            for contributors in (None, [group.size - 1], list(range(group.size - 1)) or [0]):
                mine = numbers(group.rank, size, dtype)
                before = bits(mine)
                out = torch.full((size,), 77).to(dtype)
                gives = contributors is None or group.rank in contributors
                reduce_in_order(
                    group, mine if gives else None, out, always, contributors, piece_bytes=1000
                )
                assert bits(mine) == before
                results.append(bits(out))
    return results


def counts(group: Group, _: Told) -> list[int]:
    """The bytes that were counted after a reduce of all, of all but the last, and of int64."""
    last = group.size - 1
    found: list[int] = []
    kinds = ((torch.float32, None), (torch.float32, range(last)), (torch.int64, None))
    for dtype, contributors in kinds:
        before = group.sent
        gives = contributors is None or group.rank in contributors
        mine = numbers(group.rank, 600, dtype)
        reduce_in_order(
            group, mine if gives else None, torch.empty_like(mine), always, contributors,
            piece_bytes=480,
        )  # fmt: skip
        found.append(group.sent - before)
        all_gather_bytes(group, b"a header is not counted", 100, always)
    return found


def exchanges(group: Group, _: Told) -> list[list[bytes]]:
    texts = [b"", bytes([group.rank]) * 64, b"x" * (900 * (group.rank + 1)), os.urandom(0)]
    gathered = [all_gather_bytes(group, text, 5000, always) for text in texts]
    with pytest.raises(FrameError, match="5001 bytes"):
        all_gather_bytes(group, b"x" * 5001, 5000, always)
    return gathered


def reduces_for_ever(group: Group, told: Told, where: str, seconds: float) -> tuple[str, bool]:
    """Reduce until the group breaks, or a file says that the generation has ended. Whoever sees it
    break makes that file, as a member tells its anchor."""
    word = Path(where, "ended")
    mine = torch.full((BIG,), float(group.rank))
    out = torch.empty_like(mine)
    alive = Deadline(seconds, word)
    told.send("begins")
    try:
        while True:
            reduce_in_order(group, mine, out, alive)
            alive()
    except GroupBroken as error:
        word.touch()
        return str(error), bool((mine == group.rank).all())
    except Ended:
        return "ended", bool((mine == group.rank).all())


class FreezingFiles(Files):
    """A rendezvous at which a member leaves its address, and stops there."""

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """How a member came away from forming a group with one that had stopped."""

    error: str
    seconds: float
    """How long it has waited."""
    still_forming: bool
    """Whether torch was still waiting for the frozen member by then."""
    left: list[str]
    """The threads that were still there at the end."""


def forms_with_a_frozen_member(
    group: Group, _: Told, where: str, timeout: float, ends_after: float
) -> LeftAlone:
    frozen = group.rank == 1
    # The member with the higher address connects, so that each of the others waits for the frozen
    # one. Where they connect they would be through: its host's system answers.
    place = GroupPlace(2, group.rank, group.size, "127.0.0.2" if frozen else HOST)
    if frozen:
        form_group(FreezingFiles(Path(where)), place, 60.0, always, Graveyard())
    before = tasks()
    graveyard, alive = Graveyard(), Deadline(ends_after)
    began, error = time.monotonic(), ""
    try:
        form_group(Files(Path(where)), place, timeout, alive, graveyard).abandon(graveyard)
    except (Ended, GroupBroken) as raised:
        error = type(raised).__name__
    seconds = time.monotonic() - began
    still_forming = "elastic-forming" in {thread.name for thread in threading.enumerate()}
    graveyard.close()
    return LeftAlone(error, seconds, still_forming, left_over(before))


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What is to be told of generations that were abandoned one right after the other."""

    resident: list[int]
    """Bytes of memory, at the first sample, the next one, ..."""
    allocated: list[int]
    """Bytes that are in use of what malloc has given."""
    threads: list[list[str]]
    """Those that were not there before."""
    most_waiting: int
    """Groups that had not ended yet."""


def many_generations(
    group: Group, _: Told, where: str, count: int, every: int, first: int
) -> Abandoned:
    """Form and abandon groups; look at the memory every so many generations, from the first on."""
    files = Files(Path(where))
    before = tasks()
    graveyard = Graveyard()
    told = Abandoned([], [], [], 0)
    for generation in range(1, count + 1):
        place = GroupPlace(generation + 1, group.rank, group.size, HOST)
        fresh = form_group(files, place, 60.0, always, graveyard)
        all_gather_bytes(fresh, b"header", 100, always)
        alive = Deadline(0.0)
        if group.rank == 0:
            # The other member never comes to this reduce, and may have hung up already.
            with pytest.raises((Ended, GroupBroken)):
                reduce_in_order(fresh, torch.ones(1 << 16), torch.empty(1 << 16), alive)
        fresh.abandon(graveyard)
        del fresh
        told = replace(told, most_waiting=max(told.most_waiting, burials()))
        if generation >= first and not (generation - first) % every:
            while burials():
                os.sched_yield()
            told.threads.append(left_over(before))
            told.resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
            told.allocated.append(allocated())
    graveyard.close()
    return told


def burials() -> int:
    """The number of groups that have not ended yet."""
    return sum(thread.name == "elastic-graveyard" for thread in threading.enumerate())


class Mallinfo2(ctypes.Structure):
    """What the C library tells of its heaps: struct mallinfo2 of malloc.h."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


def allocated() -> int:
    """Return the bytes that are in use of what malloc has given, in all its heaps."""
    gc.collect()
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = Mallinfo2
    told = library.mallinfo2()
    return told.uordblks + told.hblkhd
