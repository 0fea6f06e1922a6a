"""Whose workers begin first: the rule, and who is counted."""

import copy
import pickle
import threading

import pytest

from loaders.workers import precedence
from loaders.workers.precedence import Attendance, Precedence, ProcessWorkers, may_begin


def in_front() -> bool:
    return False


def is_behind() -> bool:
    return True


@pytest.fixture
def process_workers(monkeypatch: pytest.MonkeyPatch) -> ProcessWorkers:
    fresh = ProcessWorkers()
    monkeypatch.setattr(precedence, "process_workers", fresh)
    return fresh


@pytest.mark.parametrize("others", range(5))
def test_a_loader_in_front_begins_whoever_is_at_work(others: int) -> None:
    assert may_begin(False, others, workers=1)


@pytest.mark.parametrize("workers", range(1, 5))
def test_a_loader_behind_begins_while_fewer_than_its_own_workers_are_at_work(workers: int) -> None:
    begins = [may_begin(True, others, workers) for others in range(6)]
    assert begins == [others < workers for others in range(6)]
    assert begins[0], "so one can always begin, and nobody waits for ever"


def test_workers_are_counted_from_their_first_job_until_they_rest(
    process_workers: ProcessWorkers,
) -> None:
    front, behind = Attendance(2), Attendance(1)
    assert front.begins(in_front) and front.begins(in_front) and len(process_workers.working) == 1
    assert not behind.begins(is_behind) and len(process_workers.working) == 1
    front.rests()
    assert behind.begins(is_behind) and front.begins(in_front) and len(process_workers.working) == 2
    assert not behind.begins(is_behind), "its next sample waits"
    assert len(process_workers.working) == 1
    assert behind.begins(in_front) and len(process_workers.working) == 2, "it has come to the front"
    front.leave()
    behind.leave()
    assert len(process_workers.working) == 0


def test_whoever_waits_is_told_even_of_a_change_before_it_waited(
    process_workers: ProcessWorkers,
) -> None:
    front, behind = Attendance(1), Attendance(1)
    front.begins(in_front)
    assert not behind.begins(is_behind)
    front.rests()
    behind.wait()
    front.begins(in_front)
    assert not behind.begins(is_behind)
    waits = threading.Thread(target=behind.wait, daemon=True)
    waits.start()
    assert waits.is_alive()
    Precedence().gives_way = False
    waits.join(60)
    assert not waits.is_alive()


def test_a_loader_that_comes_to_the_front_while_its_worker_asks_is_not_missed(
    process_workers: ProcessWorkers,
) -> None:
    ours = Precedence()
    ours.gives_way = True
    asked: list[bool] = []

    def asks() -> bool:
        asked.append(ours.gives_way)
        if len(asked) == 1:
            ours.gives_way = False  # nobody hears of it: the worker does not wait yet
        return asked[-1]

    front, worker = Attendance(1), Attendance(1)
    front.begins(in_front)
    assert worker.begins(asks) and asked == [True, False]


def test_copies_are_in_front() -> None:
    behind = Precedence()
    behind.behind = True
    copies = (copy.copy(behind), copy.deepcopy(behind), pickle.loads(pickle.dumps(behind)))
    assert behind.behind and not any(one.gives_way for one in copies)
