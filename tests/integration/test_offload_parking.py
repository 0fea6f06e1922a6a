"""Residents that wait on the host while another job has the device: values, places, what it costs.

one .. other .. one .. other       hand-overs; each parks the job before it
"""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import stage_jobs as jobs

from offload.errors import MemoryTooSmall
from offload.memory import room, waiting_place
from offload.memory.homes import Home, resident_bytes
from offload.memory.host_memory import HostMemoryLeft
from offload.running.arena_lender import SwapTotals
from offload.running.runner import Runner

BUDGET = 24_000
"""Of `chain(4, 4096)`: some tensors are resident, the others are streamed."""


@pytest.fixture
def pair() -> Any:
    """Two jobs on a stage, of which the first one is parked."""
    one, other = jobs.Job.chain(4, 4096, BUDGET), jobs.Job.chain(3, 1024)
    with jobs.stage("threads") as stage:
        first, second = Runner(one.plan, stage=stage), Runner(other.plan, stage=stage)
        one.step(first)
        resident = jobs.on_device(first, one)
        assert resident and len(resident) < len(one.tensors)
        other.step(second)
        yield one, first, other, second, resident
        first.close()
        second.close()


def test_residents_wait_at_the_same_place_at_every_hand_over(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, first, other, second, resident = pair
    made: list[int] = []
    taken = waiting_place.HostArena

    def arena(nbytes: int, *more: Any) -> Any:
        made.append(nbytes)
        return taken(nbytes, *more)

    monkeypatch.setattr(waiting_place, "HostArena", arena)
    at = {name: one.tensors[name].data_ptr() for name in resident}
    assert sorted(jobs.waiting(first, one)) == sorted(resident)
    for _ in range(3):
        one.step(first)
        assert jobs.waiting(first, one) == []
        other.step(second)
        assert {name: one.tensors[name].data_ptr() for name in resident} == at
    assert made == [] and one.is_right() and other.is_right()


def test_what_the_user_writes_to_a_parked_tensor_is_what_the_next_step_reads(pair: Any) -> None:
    one, first, _, _, resident = pair
    changed, pointed = resident[:2]
    one.tensors[changed].add_(1)
    one.plain[changed].add_(1)
    new = torch.flip(one.plain[pointed], (0,))
    kept = new.clone()
    one.tensors[pointed].data = new
    one.plain[pointed].copy_(kept)
    one.step(first)
    assert one.is_right()
    assert torch.equal(new, kept)  # the user's memory is the user's


def test_what_hand_overs_cost_is_counted_in_bytes_and_seconds() -> None:
    one, other = jobs.Job.chain(4, 4096, BUDGET), jobs.Job.chain(3, 1024)
    with jobs.stage("serial") as stage:
        clock = iter(range(1000))
        stage.lender.clock = lambda: float(next(clock))
        first = Runner(one.plan, stage=stage)
        one.step(first)
        assert stage.swaps == SwapTotals()
        second = Runner(other.plan, stage=stage)  # parks the first one
        out = sum(one.tensors[name].nbytes for name in jobs.waiting(first, one))
        assert stage.swaps == SwapTotals(out, 0, 1.0)
        one.step(first)  # parks the second one, and brings the first one's home
        back = sum(other.tensors[name].nbytes for name in jobs.waiting(second, other))
        assert stage.swaps == SwapTotals(out + back, out, 3.0)
        first.close()
        second.close()


def test_a_stage_that_grows_frees_the_arena_that_was_too_small() -> None:
    small, large = jobs.Job.chain(2, 1024), jobs.Job.chain(6, 4096)
    with jobs.stage("serial") as stage:
        first = Runner(small.plan, stage=stage)
        small.step(first)
        old = weakref.ref(stage.lender.arena)
        second = Runner(large.plan, stage=stage)
        gc.collect()
        assert old() is None
        assert sorted(jobs.waiting(first, small)) == sorted(small.tensors)
        large.step(second)
        small.step(first)
        first.close()
        second.close()
    assert small.is_right() and large.is_right()


def test_another_step_of_a_parked_job_begins_with_the_values_that_wait() -> None:
    """Its plan may have other residents, or lack some of the tensors."""
    one, other = jobs.Job.chain(4, 4096, BUDGET), jobs.Job.chain(3, 1024)
    with jobs.stage("threads") as stage:
        first, second = Runner(one.plan, stage=stage), Runner(other.plan, stage=stage)
        first.add("again", jobs.part(one, 2))
        for _ in range(2):
            one.step(first)
            other.step(second)
            first.run("again", one.batch)
            jobs.part_of_plain(one, 2)
            assert one.is_right()
            other.step(second)
        first.close()
        second.close()
    assert one.is_right() and other.is_right()


@pytest.mark.parametrize("leaver", ["the runner", "the stage"])
def test_a_job_that_ends_while_it_is_parked_has_memory_of_its_own(pair: Any, leaver: str) -> None:
    one, first, _, _, _ = pair
    place = first._memory.waiting
    if leaver == "the stage":
        first.stage.close()
        assert one.is_right() and jobs.waiting(first, one)
    first.close()
    assert one.is_right()
    assert not any(place.contains(tensor.data_ptr()) for tensor in one.tensors.values())


class HitAfterOne(list[Any]):
    """Seats of a way: a Ctrl-C hits after the first tensor has changed its place."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += 1
        yield self[0]
        if self.looks > 1:  # the first look asks only where they are
            raise KeyboardInterrupt
        yield from self[1:]


@pytest.mark.parametrize("hit", ["the way out", "the way back"])
def test_a_way_that_is_hit_half_way_loses_no_tensor(pair: Any, hit: str) -> None:
    one, first, other, second, _ = pair
    if hit == "the way out":
        one.step(first)
    homes = first._memory.current
    waiting, way, *rest = homes._way
    homes._way = (waiting, replace(way, seats=HitAfterOne(way.seats)), *rest)
    with pytest.raises(KeyboardInterrupt):
        first.park() if hit == "the way out" else first(one.batch)
    assert one.is_right()
    other.step(second)
    assert one.is_right()
    one.step(first)
    assert one.is_right() and other.is_right()


def test_a_tensor_that_has_changed_since_the_last_hand_over_takes_another_way(pair: Any) -> None:
    one, first, other, second, [name, *_] = pair
    tensor = one.tensors[name]
    one.step(first)
    tensor.data = tensor.data.clone()  # while it is at home
    other.step(second)
    assert one.is_right()
    one.step(first)
    other.step(second)
    tensor.data = tensor.data.clone()  # while it waits
    one.step(first)
    assert one.is_right() and other.is_right()


def test_a_step_that_is_hit_while_tensors_come_home_loses_none(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, first, other, second, _ = pair
    brought: list[str] = []
    bring = Home.bring

    def once(home: Any, live: Any, **more: Any) -> None:
        if brought:
            raise KeyboardInterrupt
        brought.append(home.key)
        bring(home, live, **more)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Home, "bring", once)
        first._memory.current._way = None  # each tensor by itself, as after a change
        first(one.batch)
    assert one.is_right()
    other.step(second)
    assert one.is_right()
    one.step(first)
    assert one.is_right() and other.is_right()


def test_a_runner_that_is_alone_takes_the_place_when_it_is_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = jobs.Job.chain(4, 4096, BUDGET)
    with Runner(job.plan, "threads") as runner:
        job.step(runner)
        resident = jobs.on_device(runner, job)
        with monkeypatch.context() as patched:
            patched.setattr(room, "memory_left", lambda: HostMemoryLeft(100, "a small machine"))
            with pytest.raises(
                MemoryTooSmall, match=r"parked.*a small machine|a small machine.*parked"
            ):
                runner.park()
        assert jobs.on_device(runner, job) == resident
        for _ in range(2):
            runner.park()
            runner.park()
            assert jobs.on_device(runner, job) == []
            assert sorted(jobs.waiting(runner, job)) == sorted(resident)
            job.step(runner)
    assert job.is_right()


def test_no_room_to_park_is_told_to_the_job_that_comes_and_not_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = jobs.Job.chain(4, 4096, BUDGET), jobs.Job.chain(3, 1024)
    with jobs.stage("serial") as stage:
        first = Runner(one.plan, stage=stage)
        one.step(first)
        asked = []
        monkeypatch.setattr(room, "check_memory", lambda *given: asked.append(given[-1]))
        second = Runner(other.plan, stage=stage)
        assert asked == [resident_bytes(other.plan.memgraph)]
        other.step(second)
        one.step(first)
        assert len(asked) == 1
        first.close()
        second.close()
