"""Members as real processes reduce, exchange, and are killed and stopped in the middle of it."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_groups import HOST, Deadline, Ended, Files, Group, Members, always, tasks

from trainers.elastic.reducing import (
    FrameError,
    Graveyard,
    GroupBroken,
    ReducingError,
    all_gather_bytes,
    form_group,
    reduce_in_order,
    sum_in_order,
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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_reduce_has_the_bits_of_one_process_that_adds_in_order(size: int, tmp_path: Path) -> None:
    with Members(reduces, size, tmp_path) as members:
        answers = members.answers()
    expected = [
        bits(sum_in_order([numbers(r, n, dtype) for r in ranks]))
        for dtype in DTYPES
        for n in SIZES
        for ranks in (range(size), [size - 1], range(size - 1) if size > 1 else [0])
    ]
    assert all(answer == expected for answer in answers)


def exchanges(group: Group, _: Connection) -> list[list[bytes]]:
    texts = [b"", bytes([group.rank]) * 64, b"x" * (900 * (group.rank + 1)), os.urandom(0)]
    gathered = [all_gather_bytes(group, text, 5000, always) for text in texts]
    with pytest.raises(FrameError, match="5001 bytes"):
        all_gather_bytes(group, b"x" * 5001, 5000, always)
    return gathered


def test_everybody_gets_the_bytes_of_everybody_by_rank(tmp_path: Path) -> None:
    with Members(exchanges, 3, tmp_path) as members:
        answers = members.answers()
    expected = [
        [b"", b"", b""],
        [bytes([r]) * 64 for r in range(3)],
        [b"x" * (900 * (r + 1)) for r in range(3)],
        [b"", b"", b""],
    ]
    assert answers == [expected] * 3


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


def test_a_killed_member_is_an_error_within_half_a_second_and_sums_survive(
    tmp_path: Path,
) -> None:
    with Members(reduces_for_ever, 3, tmp_path, seconds=100.0) as members:
        assert [members.heard(rank) for rank in range(3)] == ["begins"] * 3
        victim = members.processes[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        for text, when, intact in (members.answer(0), members.answer(2)):
            assert "generation 1" in text and f"the reduce of {BIG} numbers failed" in text
            assert when - killed < 0.5
            assert intact


def test_a_stopped_member_ends_the_wait_by_alive_and_leaves_no_thread(tmp_path: Path) -> None:
    with Members(reduces_for_ever, 3, tmp_path, seconds=2.0) as members:
        assert [members.heard(rank) for rank in range(3)] == ["begins"] * 3
        victim = members.processes[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)
        stopped = [members.answer(0), members.answer(2)]
        assert any(text == "ended" for text, *_ in stopped)
        assert all(intact for *_, intact in stopped)
        assert all(late < 0.5 for text, late, _ in stopped if text == "ended")


def many_generations(group: Group, _: Connection, folder: str, count: int) -> dict[str, Any]:
    files = Files(Path(folder))
    graveyard = Graveyard()
    memory: list[int] = []
    threads: list[int] = []
    for generation in range(2, count + 2):
        fresh = form_group(files, generation, group.rank, group.size, HOST, 60.0)
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
            threads.append(tasks())
    graveyard.close()
    return {"memory": memory, "threads": threads}


def test_abandoned_generations_leave_memory_flat_and_no_thread(tmp_path: Path) -> None:
    with Members(many_generations, 2, tmp_path, folder=str(tmp_path), count=200) as members:
        for answer in members.answers():
            assert len(set(answer["threads"])) == 1
            assert answer["memory"][-1] - answer["memory"][0] < 4 << 20


class Empty:
    """A rendezvous whose generation has ended."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes:
        raise Ended(key)


def test_what_the_rendezvous_raises_ends_forming() -> None:
    with pytest.raises(Ended, match="generation 7/"):
        form_group(Empty(), 7, 0, 2, HOST, 60.0)


def test_contributors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    group = form_group(Files(tmp_path), 1, 0, 1, HOST, 60.0)
    graveyard = Graveyard()
    ones = torch.ones(2)
    with pytest.raises(ReducingError, match="at least one rank"):
        reduce_in_order(group, ones, torch.empty(2), always, [])
    with pytest.raises(ReducingError, match="not given"):
        reduce_in_order(group, None, torch.empty(2), always)
    with pytest.raises(ReducingError, match="must be alike"):
        reduce_in_order(group, ones, torch.empty(3), always)
    group.abandon(graveyard)
    with pytest.raises(ReducingError, match="abandoned"):
        reduce_in_order(group, ones, torch.empty(2), always)
    graveyard.close()
