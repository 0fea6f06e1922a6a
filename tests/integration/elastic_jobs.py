"""What members do in the tests of reducing: functions that a fresh process can import."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_groups import HOST, Deadline, Ended, Files, always, left_over, tasks

from trainers.elastic.reducing import (
    FrameError,
    Graveyard,
    Group,
    GroupBroken,
    GroupPlace,
    all_gather_bytes,
    form_group,
    reduce_in_order,
)

SIZES = (1, 2, 3, 5, 1000, 4099)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
BIG = 1 << 24


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * rank + size)
    floats = torch.randn(size, generator=made) * 10.0 ** (3 * rank)
    return (floats * 1000).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def reduces(group: Group, _: Connection) -> list[bytes]:
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


def exchanges(group: Group, _: Connection) -> list[list[bytes]]:
    texts = [b"", bytes([group.rank]) * 64, b"x" * (900 * (group.rank + 1)), os.urandom(0)]
    gathered = [all_gather_bytes(group, text, 5000, always) for text in texts]
    with pytest.raises(FrameError, match="5001 bytes"):
        all_gather_bytes(group, b"x" * 5001, 5000, always)
    return gathered


def reduces_for_ever(group: Group, pipe: Connection, seconds: float) -> tuple[str, float, bool]:
    mine = torch.full((BIG,), float(group.rank))
    out = torch.empty_like(mine)
    alive = Deadline(seconds)
    pipe.send("begins")
    try:
        while True:
            reduce_in_order(group, mine, out, alive)
            alive()
    except GroupBroken as error:
        return str(error), time.monotonic(), bool((mine == group.rank).all())
    except Ended:
        return "ended", time.monotonic() - alive.raised, bool((mine == group.rank).all())


class FreezingFiles(Files):
    """A rendezvous at which a member leaves its address, and stops there."""

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        os.kill(os.getpid(), signal.SIGSTOP)


def forms_with_a_frozen_member(group: Group, _: Connection, where: str) -> tuple[float, list[str]]:
    """Return how late the others came away, and the threads that were left at the end."""
    place = GroupPlace(2, group.rank, group.size, HOST)
    if group.rank == 1:
        form_group(FreezingFiles(Path(where)), place, 60.0, always, Graveyard())
    before = tasks()
    graveyard, alive = Graveyard(), Deadline(1.0)
    late = 0.0  # A member that connects to the frozen one is connected: its host's system answers.
    try:
        form_group(Files(Path(where)), place, 3.0, alive, graveyard).abandon(graveyard)
    except Ended:
        late = time.monotonic() - alive.raised
    graveyard.close()
    return late, left_over(before)


def many_generations(group: Group, _: Connection, where: str, count: int) -> dict[str, Any]:
    files = Files(Path(where))
    graveyard = Graveyard()
    memory: list[int] = []
    threads: list[int] = []
    for generation in range(2, count + 2):
        place = GroupPlace(generation, group.rank, group.size, HOST)
        fresh = form_group(files, place, 60.0, always, graveyard)
        all_gather_bytes(fresh, b"header", 100, always)
        alive = Deadline(0.0)
        if group.rank == 0:
            # The other members never come to this reduce.
            with pytest.raises(Ended):
                reduce_in_order(fresh, torch.ones(1 << 16), torch.empty(1 << 16), alive)
        fresh.abandon(graveyard)
        del fresh
        if generation % 50 == 0:
            while graveyard.waiting:
                os.sched_yield()
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
            threads.append(len(tasks()))
    graveyard.close()
    return {"memory": memory, "threads": threads}
