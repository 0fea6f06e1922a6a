"""Members as real processes reduce, exchange, and are killed and stopped in the middle of it."""

import gc
import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.elastic_groups import (
    FOR_EVER,
    HOST,
    TRANSFER,
    Deadline,
    Ended,
    Files,
    Members,
    always,
    left_over,
    tasks,
)
from support.elastic_jobs import (
    BIG,
    DTYPES,
    SIZES,
    bits,
    exchanges,
    forms_with_a_frozen_member,
    many_generations,
    numbers,
    reduces,
    reduces_for_ever,
)
from support.products import only_first
from support.wire_ends import few_descriptors

from benchmarks.swarms.swarm import Nursery, until
from trainers.elastic.errors import ReducingError
from trainers.elastic.reducing.canonical import reduce_in_order, sum_in_order
from trainers.elastic.reducing.graveyard import Graveyard
from trainers.elastic.reducing.group import GroupPlace, form_group, open_sockets


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_reduce_has_the_bits_of_one_process_that_adds_in_order(
    size: int, nursery: Nursery, tmp_path: Path
) -> None:
    with Members(nursery, reduces, size, tmp_path) as members:
        answers = members.answers()
    expected = [
        bits(sum_in_order([numbers(r, n, dtype) for r in ranks]))
        for dtype in DTYPES
        for n in SIZES
        for ranks in (range(size), [size - 1], range(size - 1) if size > 1 else [0])
    ]
    assert all(answer == expected for answer in answers)


def test_everybody_gets_the_bytes_of_everybody_by_rank(nursery: Nursery, tmp_path: Path) -> None:
    with Members(nursery, exchanges, 3, tmp_path) as members:
        answers = members.answers()
    expected = [
        [b"", b"", b""],
        [bytes([r]) * 64 for r in range(3)],
        [b"x" * (900 * (r + 1)) for r in range(3)],
        [b"", b"", b""],
    ]
    assert answers == [expected] * 3


@pytest.mark.parametrize(("told", "transfer"), [(True, FOR_EVER), (False, TRANSFER)])
def test_a_killed_member_ends_the_reduce_of_the_others_and_sums_survive(
    told: bool, transfer: float, nursery: Nursery, tmp_path: Path
) -> None:
    """An anchor learns of a death from the closed connection, and tells the others at once. Without
    its word gloo wakes nobody who is in the middle of a message, and a reduce ends by its time."""
    how: dict[str, Any] = {"where": str(tmp_path), "seconds": FOR_EVER, "transfer": transfer}
    with Members(nursery, reduces_for_ever, 3, tmp_path, **how) as members:
        assert [members.heard(rank) for rank in range(3)] == ["begins"] * 3
        members.processes[1].kill()
        if told:
            tmp_path.joinpath("ended").touch()
        survivors = [members.answer(0), members.answer(2)]
    errors = [text for text, _ in survivors if text != "ended"]
    assert told or errors
    for text in errors:
        assert "generation 1" in text and f"the reduce of {BIG} numbers failed" in text
    assert all(intact for _, intact in survivors)


def test_a_stopped_member_ends_the_wait_by_alive_and_leaves_no_thread(
    nursery: Nursery, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"where": str(tmp_path), "seconds": 2.0, "transfer": FOR_EVER}
    with Members(nursery, reduces_for_ever, 3, tmp_path, **how) as members:
        assert [members.heard(rank) for rank in range(3)] == ["begins"] * 3
        members.processes[1].kill(signal.SIGSTOP)
        stopped = [members.answer(0), members.answer(2)]
    assert any(text == "ended" for text, _ in stopped)
    assert all(intact for _, intact in stopped)


@pytest.mark.parametrize("count", only_first(300, 1000))
def test_abandoned_generations_leave_memory_flat_and_no_thread(
    count: int, nursery: Nursery, tmp_path: Path
) -> None:
    # Torch keeps notes of the last 2,000 operations, which come to be over 1,000 generations.
    environment = {"TORCH_FR_BUFFER_SIZE": "0"}
    often: dict[str, Any] = {"environment": environment, "count": count, "every": 50, "first": 100}
    with Members(nursery, many_generations, 2, tmp_path, where=str(tmp_path), **often) as members:
        for told in members.answers():
            assert not any(told.threads)
            assert told.most_waiting < 50
            # Of each generation, torch keeps some 150 bytes.
            assert told.allocated[-1] - told.allocated[0] < (count - 100) << 10
            assert told.resident[-1] - told.resident[0] < 4 << 20


def beside_a_frozen_member(
    nursery: Nursery, where: Path, timeout: float, ends_after: float
) -> list[Any]:
    """What the two others tell of a group that has `timeout` seconds to form. The anchor, which
    these tests play, ends the generation after `ends_after` seconds."""
    how: dict[str, Any] = {"timeout": timeout, "ends_after": ends_after}
    with Members(nursery, forms_with_a_frozen_member, 3, where, where=str(where), **how) as members:
        return [members.answer(0), members.answer(2)]


def test_a_member_that_stops_while_the_group_forms_holds_nobody_up(
    nursery: Nursery, tmp_path: Path
) -> None:
    for told in beside_a_frozen_member(nursery, tmp_path, timeout=10.0, ends_after=0.5):
        assert (told.error, told.left) == ("Ended", [])
        assert told.still_forming


def test_members_wait_for_one_that_does_not_connect_as_long_as_was_said(
    nursery: Nursery, tmp_path: Path
) -> None:
    for told in beside_a_frozen_member(nursery, tmp_path, timeout=1.0, ends_after=FOR_EVER):
        assert (told.error, told.left) == ("GroupBroken", [])
        assert told.seconds >= 1.0


GARBAGE = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\xff" * 5000, b"\1" + bytes(6)]


@pytest.mark.skipif(sys.platform != "linux", reason="a door is shut by a filter of Linux")
def test_strangers_at_the_addresses_of_a_group_end_nobody_and_are_kept_out_once_it_is_there(
    tmp_path: Path,
) -> None:
    """Gloo ends its process when it has no descriptor left for a connection."""
    graveyard, before, store = Graveyard(), open_sockets(), Files(tmp_path)
    sums: list[float] = []
    here, strangers_were_here = threading.Barrier(3), threading.Event()

    def member(rank: int) -> None:
        group = form_group(store, GroupPlace(1, rank, 2, HOST), 60.0, always, graveyard)
        here.wait(60)
        strangers_were_here.wait()
        total = torch.empty(3)
        reduce_in_order(group, torch.ones(3), total, always)
        sums.append(float(total.sum()))
        group.abandon(graveyard)

    def doors() -> list[tuple[str, int]]:
        found = [socket.socket(fileno=os.dup(n)) for n in open_sockets() - before]
        with ExitStack() as stack:
            alive = [stack.enter_context(one) for one in found]
            what = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            return [one.getsockname() for one in alive if one.getsockopt(*what)]

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    with ExitStack() as stack:
        stack.callback(strangers_were_here.set)
        threads[0].start()
        until(lambda: len(doors()) == 1, "the first member's door", 60)
        for garbage in GARBAGE * 3:
            stranger = stack.enter_context(socket.create_connection(doors()[0], 60))
            stranger.sendall(garbage)
        threads[1].start()
        here.wait(60)
        for door in doors():
            with pytest.raises(OSError):
                socket.create_connection(door, 0.5)
        assert len(doors()) == 2
    for thread in threads:
        thread.join()
    graveyard.close()
    assert sums == [6.0, 6.0]


def test_a_peer_without_file_descriptors_says_so(tmp_path: Path) -> None:
    graveyard, said = Graveyard(), r"no file descriptor is left .* 1 others: raise"
    with few_descriptors(left=1), pytest.raises(ReducingError, match=said):
        form_group(Files(tmp_path), GroupPlace(1, 0, 2, HOST), 60.0, always, graveyard)
    graveyard.close()


@pytest.mark.parametrize("left_early", [False, True])
def test_a_group_that_does_not_form_leaves_no_thread_to_the_garbage_collector(
    left_early: bool, tmp_path: Path
) -> None:
    place, graveyard, before = GroupPlace(1, 0, 2, HOST), Graveyard(), tasks()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Ended if left_early else TimeoutError) as raised:
            alive = Deadline(0.0) if left_early else always
            form_group(Files(tmp_path), place, 2.0 if left_early else 0.2, alive, graveyard)
        graveyard.close()
        assert left_over(before) == []
        del raised
    finally:
        gc.enable()
