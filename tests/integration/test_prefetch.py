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


def pool(slots: int, workers: int = 1) -> Prefetcher:
    return Prefetcher(slots=slots, workers=workers)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("perfect-decode-")]


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


def test_the_time_that_the_consumer_waits_is_stall_and_a_ready_batch_costs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

    monkeypatch.setattr("loaders.workers.crew.perf_counter", clock)
    ours = pool(slots=1)
    ours.begin(work(1, read, reuse=2))
    ours.plan(0, serve(0))
    ours.take()
    assert ours.stall_seconds == 3.0
    ours.plan(1, serve(0, number=1))
    ours.take()
    assert ours.stall_seconds == 3.0
    ours.close()


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
