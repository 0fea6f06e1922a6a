"""The threads themselves: waiting, back-pressure, whose slot is whose, the next pass, the end."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loaders.errors import PassEnded
from loaders.order.serve import Serve
from loaders.workers.decode_work import DecodeWork, Done, PassJobs, WorkProgress
from loaders.workers.prefetcher import Prefetcher

Reading = Callable[[Sequence[int], Sequence[int]], None]


def nothing(positions: Sequence[int], slots: Sequence[int]) -> None:
    """Reads in no time."""


def work(
    count: int,
    read: Reading = nothing,
    reuse: int = 1,
    make: Callable[[int, Serve, NDArray[np.int64]], Any] | None = None,
) -> DecodeWork:
    """A batch is who is in it, and in which slots."""
    made = make or (lambda _, serve, slots: (serve.positions.tolist(), slots.tolist()))

    def read_all(positions: Sequence[int], slots: Sequence[int], done: Done) -> None:
        read(positions, slots)
        for position in positions:
            done(position)

    return DecodeWork(PassJobs.whole_pass(count), read_all, made, reuse)


def serve(*positions: int, number: int = 0) -> Serve:
    return Serve(np.array(positions), np.full(len(positions), number))


def pool(slots: int, workers: int = 1, clock: Callable[[], float] | None = None) -> Prefetcher:
    return Prefetcher(slots=slots, workers=workers, **({"clock": clock} if clock else {}))


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("perfect-decode-")]


def test_batches_come_in_the_order_of_the_plan_whoever_makes_them() -> None:
    ours = pool(slots=6, workers=3)
    ours.begin(work(60))
    for index in range(30):
        ours.plan(index, serve(2 * index, 2 * index + 1))
    assert [ours.take()[0] for _ in range(30)] == [[2 * i, 2 * i + 1] for i in range(30)]
    ours.close()


def test_a_plan_that_ends_after_the_next_pass_has_begun_does_not_end_that_one() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def first() -> Iterator[tuple[int, Serve]]:
        yield 0, serve(0)
        asked.set()
        assert go_on.wait(60)

    ours = pool(slots=4, workers=1)
    ours.begin(work(1), first())
    assert ours.take()[0] == [0]
    assert asked.wait(60)  # the worker is about to learn that there is no other batch
    ours.finish()
    ours.begin(work(2), iter([(0, serve(0)), (1, serve(1))]))
    go_on.set()
    assert [ours.take()[0] for _ in range(2)] == [[0], [1]]
    ours.close()


def test_workers_ask_for_the_plan_one_at_a_time_and_no_further_than_wanted() -> None:
    asked, inside = [], threading.Lock()

    def plan() -> Iterator[tuple[int, Serve]]:
        for index in range(20):
            assert inside.acquire(blocking=False), "two at once"
            asked.append(index)
            inside.release()
            yield index, serve(2 * index, 2 * index + 1)

    ours = Prefetcher(slots=8, workers=4, ahead=2)
    ours.begin(work(40), plan())
    for index in range(20):
        assert ours.take()[0] == [2 * index, 2 * index + 1]
        assert len(asked) <= index + 1 + 2
    ours.close()


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_worker_reads_as_soon_as_so_many_batches_are_planned_as_are_wanted(ahead: int) -> None:
    asked: list[int] = []
    asked_before_read: list[int] = []
    has_read = threading.Event()

    def plan() -> Iterator[tuple[int, Serve]]:
        for index in range(8):
            asked.append(index)
            yield index, serve(index)

    def read(positions: Sequence[int], slots: Sequence[int]) -> None:
        asked_before_read.append(len(asked))
        has_read.set()

    ours = Prefetcher(slots=2, workers=1, ahead=ahead)
    ours.begin(work(8, read), plan())
    assert has_read.wait(60)
    ours.close()
    assert asked_before_read[0] == ahead


def test_a_plan_that_fails_fails_where_its_batch_would_come() -> None:
    def plan() -> Iterator[tuple[int, Serve]]:
        yield 0, serve(0, 1)
        raise KeyError("no more")

    ours = Prefetcher(slots=4, workers=2, ahead=2)
    ours.begin(work(4), plan())
    assert ours.take()[0] == [0, 1]
    with pytest.raises(KeyError, match="no more"):
        ours.take()
    ours.close()


def test_decoding_never_runs_further_ahead_than_there_are_slots() -> None:
    read: list[int] = []
    ours = pool(slots=4, workers=2)
    ours.begin(work(20, lambda positions, slots: read.extend(positions)))
    ours.plan(0, serve(0, 1))
    ours.take()
    ours.plan(1, serve(2, 3))
    ours.take()
    ours.plan(2, serve(4, 5, 6, 7))
    ours.take()
    ours.close()
    assert max(read) < 12, "four slots beyond the eight that were served"
    assert len(read) == len(set(read))


def test_a_slot_holds_one_sample_until_its_last_serve_is_made() -> None:
    holder: dict[int, int] = {}
    lock = threading.Lock()

    def read(positions: Sequence[int], slots: Sequence[int]) -> None:
        with lock:
            for position, slot in zip(positions, slots, strict=True):
                assert slot not in holder, "somebody is still in there"
                holder[slot] = position

    def make(index: int, batch: Serve, slots: NDArray[np.int64]) -> list[int]:
        with lock:
            held = [holder[slot] for slot in slots.tolist()]
            if batch.serves[0] == 1:
                for slot in slots.tolist():
                    del holder[slot]
            return held

    ours = pool(slots=3, workers=3)
    ours.begin(work(30, read, reuse=2, make=make))
    for index in range(10):
        trio = (3 * index, 3 * index + 1, 3 * index + 2)
        ours.plan(2 * index, serve(*trio))
        ours.plan(2 * index + 1, serve(*trio, number=1))
        assert ours.take() == ours.take() == list(trio)
    ours.close()


def test_slots_fall_free_in_the_order_of_the_plan() -> None:
    """A later batch made first frees nothing that an earlier one still reads."""
    making, go_on = threading.Event(), threading.Event()
    freed_early = []

    def make(index: int, batch: Serve, slots: NDArray[np.int64]) -> int:
        if index == 0:
            making.set()
            assert go_on.wait(60)
        return index

    ours = pool(slots=2, workers=2)
    ours.begin(work(4, lambda p, s: freed_early.extend(p), reuse=2, make=make))
    ours.plan(0, serve(0, 1))
    assert making.wait(60)
    ours.plan(1, serve(0, 1, number=1))
    done = threading.Event()
    consumer = threading.Thread(target=lambda: (ours.take(), ours.take(), done.set()))
    consumer.start()
    assert not done.wait(0.05)
    assert set(freed_early) == {0, 1}, "2 and 3 wait for the slots of 0 and 1"
    go_on.set()
    assert done.wait(60)
    consumer.join(60)
    ours.close()


def test_the_time_that_the_consumer_waits_is_stall_and_a_ready_batch_costs_none() -> None:
    asked = threading.Event()
    now = [0.0]

    def clock() -> float:
        seconds = now[0]
        if threading.current_thread() is threading.main_thread():
            asked.set()  # the consumer looks at the clock when it begins to wait
        return seconds

    def read(positions: Sequence[int], slots: Sequence[int]) -> None:
        assert asked.wait(60)
        now[0] += 3.0

    ours = pool(slots=1, clock=clock)
    ours.begin(work(1, read, reuse=2))
    ours.plan(0, serve(0))
    ours.take()
    assert ours.stall_seconds == 3.0
    ours.plan(1, serve(0, number=1))
    ours.take()
    assert ours.stall_seconds == 3.0
    ours.close()


def test_a_sample_that_takes_long_does_not_hold_up_those_before_it() -> None:
    """Though a worker takes several samples at once."""
    go_on = threading.Event()

    def read(positions: Sequence[int], slots: Sequence[int], done: Done) -> None:
        for position in positions:
            if position == 7:
                assert go_on.wait(60)
            done(position)

    ours = pool(slots=8)

    def made(_index: int, batch: Serve, _slots: NDArray[np.int64]) -> list[int]:
        return batch.positions.tolist()

    ours.begin(DecodeWork(PassJobs.whole_pass(8), read, made, 1))
    for index in range(4):
        ours.plan(index, serve(2 * index, 2 * index + 1))
    assert [ours.take() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    go_on.set()
    assert ours.take() == [6, 7]
    ours.close()


def test_the_next_pass_is_decoded_into_the_slots_that_fall_free() -> None:
    read: list[tuple[str, int]] = []
    ours = pool(slots=4)
    ours.begin(work(4, lambda p, s: read.extend(("now", i) for i in p)))
    for index in range(2):
        ours.plan(index, serve(2 * index, 2 * index + 1))
    ours.take()
    assert ours.all_taken
    following = work(4, lambda p, s: read.extend(("next", i) for i in p))
    ours.follow(following)
    ours.take()
    ours.finish()
    for thread in threads():
        thread.join(60)
    assert not threads(), "with the buffer full and nobody waiting they end"
    assert sorted(read) == sorted([("now", i) for i in range(4)] + [("next", i) for i in range(4)])
    ours.begin(following)
    ours.plan(0, serve(0, 1, 2, 3))
    assert ours.take()[0] == [0, 1, 2, 3]
    assert len(read) == 8, "nobody is decoded twice"
    ours.close()


def test_another_pass_than_the_one_that_followed_gets_all_the_slots() -> None:
    ours = pool(slots=2)
    ours.begin(work(2))
    ours.plan(0, serve(0, 1))
    ours.take()
    ours.follow(work(2))
    ours.finish()
    for thread in threads():
        thread.join(60)
    ours.begin(work(4))
    ours.plan(0, serve(0, 1))
    ours.plan(1, serve(2, 3))
    assert [ours.take()[0], ours.take()[0]] == [[0, 1], [2, 3]]
    ours.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failure_comes_after_every_batch_that_does_not_need_the_sample(workers: int) -> None:
    def read(positions: Sequence[int], slots: Sequence[int]) -> None:
        if 4 in positions:
            raise KeyError("four")

    ours = pool(slots=8, workers=workers)
    ours.begin(work(8, read, make=lambda _, batch, slots: batch.positions.tolist()))
    for index in range(4):
        ours.plan(index, serve(2 * index, 2 * index + 1))
    seen = []
    with pytest.raises(KeyError, match="four"):
        for _ in range(4):
            seen.append(ours.take())
    assert seen == [[0, 1], [2, 3]][: len(seen)]
    ours.close()
    assert not threads()


def test_a_failure_to_make_a_batch_comes_where_that_batch_would() -> None:
    def make(index: int, batch: Serve, slots: NDArray[np.int64]) -> int:
        if index == 1:
            raise KeyError("one")
        return index

    ours = pool(slots=4, workers=2)
    ours.begin(work(6, make=make))
    for index in range(3):
        ours.plan(index, serve(2 * index, 2 * index + 1))
    assert ours.take() == 0
    with pytest.raises(KeyError, match="one"):
        ours.take()
    ours.close()


def test_closing_ends_a_consumer_that_waits_and_may_be_done_twice() -> None:
    ended: list[str] = []
    reading, go_on = threading.Event(), threading.Event()

    def read(positions: Sequence[int], slots: Sequence[int]) -> None:
        reading.set()
        go_on.wait(60)

    def consume() -> None:
        try:
            ours.take()
        except PassEnded as error:
            ended.append(str(error))
        go_on.set()

    ours = pool(slots=1)
    ours.begin(work(1, read))
    ours.plan(0, serve(0))
    consumer = threading.Thread(target=consume)
    consumer.start()
    assert reading.wait(60)
    ours.close()
    consumer.join(60)
    ours.close()
    assert "one iterator at a time" in ended[0]
    assert not threads()


def test_an_end_that_strikes_a_worker_under_its_lock_ends_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the collector of garbage does: it runs a loader's finalizer between any two lines."""
    ours = pool(slots=4, workers=3)
    release = WorkProgress.release

    def struck(progress: WorkProgress, positions: Iterable[int]) -> list[int]:
        if threading.current_thread() in threads():
            ours.close()
        return release(progress, positions)

    monkeypatch.setattr(WorkProgress, "release", struck)

    def made(index: int, serve: Serve, slots: NDArray[np.int64]) -> list[int]:
        return slots.tolist()

    def read(positions: Sequence[int], slots: Sequence[int], done: Done) -> None:
        for position in positions:
            done(position)

    plan = iter([(index, serve(index)) for index in range(40)])
    ours.begin(DecodeWork(PassJobs.whole_pass(40), read, made, 1), plan)
    with pytest.raises(PassEnded):
        for _ in range(40):
            ours.take()
    while left := threads():  # those that end them are threads too
        left[0].join()
