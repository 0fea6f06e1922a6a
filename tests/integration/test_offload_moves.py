"""`runner.move_to`: what moves, by which way, what is refused, and what a failure leaves behind."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from support import stage_jobs as jobs

from offload.errors import MemoryTooSmall, StepError
from offload.graph.memgraph import places_of
from offload.graph.taskgraph import HOST
from offload.memory import passages, room
from offload.memory.host_memory import HostMemoryLeft
from offload.running.runner import Runner

BUDGETS = (20_000, 24_000, 40_000, 60_000)


def planned(job: Any, budget: int) -> Any:
    return jobs.planned(job.graph, budget)


def in_other_places(job: Any, old: Any, new: Any) -> int:
    """The bytes of the tensors whose places the two plans do not share."""
    before, after = places_of(old.memgraph), places_of(new.memgraph)
    return sum(job.tensors[name].nbytes for name in after if after[name] != before[name])


@pytest.mark.parametrize("engine", jobs.ENGINES)
def test_a_runner_moves_between_plans_and_devices_of_one_kind(engine: str) -> None:
    job = jobs.Job.mixed(5, 4096, BUDGETS[1], engine=engine)
    with (
        jobs.stage(engine) as one,
        jobs.stage(engine) as other,
        Runner(job.plan, stage=one) as runner,
    ):
        job.step(runner)
        for n, budget in enumerate((*BUDGETS, *reversed(BUDGETS))):
            moved = runner.move_to(planned(job, budget), stage=(one, other)[n % 3 == 0])
            assert moved.seconds > 0
            job.step(runner)
            assert job.is_right()
        assert other.lender.nbytes == 0 or one.lender.nbytes == 0  # the one that was left is free
    assert job.is_right()


def test_in_the_same_arenas_only_what_has_another_place_moves() -> None:
    job, large = jobs.Job.chain(4, 4096, BUDGETS[1]), jobs.Job.chain(12, 8192)
    with (
        jobs.stage("serial") as stage,
        Runner(large.plan, stage=stage),
        Runner(job.plan, stage=stage) as runner,
    ):
        job.step(runner)
        old = job.plan
        for budget in (BUDGETS[3], BUDGETS[1], BUDGETS[0], BUDGETS[2]):
            new = planned(job, budget)
            host = runner._memory.host
            grows = host is None or new.host_bytes > host.region.nbytes
            moved = runner.move_to(new)
            assert moved.way == "in place"
            if not grows:
                assert moved.nbytes == in_other_places(job, old, new)
            old = new
            job.step(runner)
        assert runner.move_to(planned(job, BUDGETS[2])).nbytes == 0  # the same plan again
    assert job.is_right()


def test_what_stays_on_the_host_stays_when_the_device_changes() -> None:
    job = jobs.Job.chain(4, 4096, BUDGETS[1])
    with (
        jobs.stage("serial") as one,
        jobs.stage("serial") as other,
        Runner(job.plan, stage=one) as runner,
    ):
        job.step(runner)
        homes = places_of(job.plan.memgraph)
        at = {name: job.tensors[name].data_ptr() for name in job.tensors}
        moved = runner.move_to(planned(job, BUDGETS[1]), stage=other)
        on_host = {name for name in homes if homes[name].arena == HOST}
        assert on_host and on_host != {*homes}
        assert {name for name in at if at[name] == job.tensors[name].data_ptr()} == on_host
        resident = {*homes} - on_host
        assert moved.nbytes == sum(job.tensors[name].nbytes for name in resident)
        job.step(runner)
    assert job.is_right()


def test_a_smaller_plan_frees_the_larger_arena() -> None:
    job = jobs.Job.chain(4, 4096, BUDGETS[3])
    with Runner(job.plan, "serial") as runner:
        job.step(runner)
        old = weakref.ref(runner.stage.lender.arena)
        moved = runner.move_to(planned(job, BUDGETS[0]))
        gc.collect()
        assert moved.way == "beside" and old() is None
        assert runner.stage.lender.nbytes <= BUDGETS[0]
        job.step(runner)
    assert job.is_right()


def left(nbytes: int) -> Any:
    return lambda: HostMemoryLeft(nbytes, "a small host")


def test_without_room_for_both_arenas_residents_wait_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = jobs.Job.chain(4, 4096, BUDGETS[3])
    with Runner(job.plan, "serial") as runner:
        job.step(runner)
        runner.park()  # so that there is a waiting place
        job.step(runner)
        new = planned(job, BUDGETS[0])
        had = runner.stage.lender.nbytes
        needed = sum(new.memgraph.arenas.values()) + new.reserve
        monkeypatch.setattr(room, "memory_left", left(needed - had + 500))
        moved = runner.move_to(new)
        assert moved.way == "by the host" and moved.nbytes > 0
        job.step(runner)
    assert job.is_right()


def test_a_device_without_room_is_refused_before_anything_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = jobs.Job.chain(4, 4096, BUDGETS[1])
    with (
        jobs.stage("serial") as one,
        jobs.stage("serial") as other,
        Runner(job.plan, stage=one) as runner,
    ):
        job.step(runner)
        at = {name: tensor.data_ptr() for name, tensor in job.tensors.items()}
        monkeypatch.setattr(room, "memory_left", left(100))
        for stage in (one, other):
            with pytest.raises(MemoryTooSmall, match="Nothing has moved, and the old plan"):
                runner.move_to(planned(job, BUDGETS[3]), stage=stage)
        assert {name: tensor.data_ptr() for name, tensor in job.tensors.items()} == at
        assert runner.stage is one and other.lender.nbytes == 0
        monkeypatch.undo()
        job.step(runner)
    assert job.is_right()


@pytest.mark.parametrize("fails_at", [0, 1, 3])
@pytest.mark.parametrize("to_other", [False, True])
def test_a_move_that_is_broken_off_loses_no_value(
    monkeypatch: pytest.MonkeyPatch, fails_at: int, to_other: bool
) -> None:
    job = jobs.Job.chain(5, 4096, BUDGETS[3])
    in_order = passages.in_order

    def broken(shifts: Any) -> Any:
        for n, step in enumerate(in_order(shifts)):
            if n == fails_at:
                raise KeyboardInterrupt
            yield step

    with (
        jobs.stage("threads") as one,
        jobs.stage("threads") as other,
        Runner(job.plan, stage=one) as runner,
    ):
        job.step(runner)
        monkeypatch.setattr(passages, "in_order", broken)
        with pytest.raises(KeyboardInterrupt):
            runner.move_to(planned(job, BUDGETS[0]), stage=other if to_other else one)
        monkeypatch.undo()
        assert job.is_right()
        assert runner.stage is one
        for _ in range(2):
            job.step(runner)
        runner.move_to(planned(job, BUDGETS[0]), stage=other if to_other else one)
        job.step(runner)
    assert job.is_right()


def test_a_job_that_waits_for_its_turn_moves_out_of_its_waiting_place() -> None:
    job, neighbour = jobs.Job.chain(4, 4096, BUDGETS[1]), jobs.Job.chain(3, 1024)
    with (
        jobs.stage("threads") as one,
        jobs.stage("threads") as other,
        Runner(job.plan, stage=one) as runner,
        Runner(neighbour.plan, stage=one) as second,
    ):
        job.step(runner)
        neighbour.step(second)
        assert jobs.waiting(runner, job)
        runner.move_to(planned(job, BUDGETS[2]), stage=other)
        assert jobs.waiting(runner, job) == []
        job.step(runner)
        neighbour.step(second)
        runner.move_to(planned(job, BUDGETS[0]), stage=one)
        neighbour.step(second)
        job.step(runner)
    assert job.is_right() and neighbour.is_right()


def test_steps_that_were_added_are_planned_again_for_the_new_plan() -> None:
    job = jobs.Job.chain(4, 4096, BUDGETS[1])
    with Runner(job.plan, "serial") as runner:
        runner.add("again", jobs.part(job, 2))
        runner.add("gone", jobs.part(job, 3))
        runner.forget("gone")
        job.step(runner)
        runner.move_to(planned(job, BUDGETS[0]))
        runner.run("again", job.batch)
        jobs.part_of_plain(job, 2)
        assert job.is_right()
        assert runner._plans["again"].memgraph.arenas[0] <= BUDGETS[0]
        with pytest.raises(StepError, match="this runner has no step 'gone'"):
            runner.run("gone", job.batch)
        job.step(runner)
    assert job.is_right()


def test_what_a_user_has_pointed_elsewhere_comes_with_the_move() -> None:
    job = jobs.Job.chain(4, 4096, BUDGETS[1])
    with Runner(job.plan, "serial") as runner:
        job.step(runner)
        new = torch.flip(job.plain["w1"], (0,))
        kept = new.clone()
        job.tensors["w1"].data = new
        job.plain["w1"].copy_(kept)
        runner.move_to(planned(job, BUDGETS[2]))
        job.step(runner)
        assert torch.equal(new, kept)
    assert job.is_right()


def test_a_guest_comes_between_two_tensors_of_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks while tensors move waits for one of them and not for all."""
    job = jobs.Job.chain(4, 4096, BUDGETS[3])
    with Runner(job.plan, "serial") as runner:
        job.step(runner)
        gate, came = runner.stage.gate, threading.Event()
        in_order = passages.in_order

        def asked() -> None:
            with gate.granted():
                came.set()

        guest = threading.Thread(target=asked)

        def ordered(shifts: Any) -> Any:
            steps = list(in_order(shifts))
            assert len(steps) > 2
            yield steps[0]
            guest.start()
            while not gate.wanted:
                threading.Event().wait(0.001)
            yield steps[1]
            assert came.is_set()
            yield from steps[2:]

        monkeypatch.setattr(passages, "in_order", ordered)
        runner.move_to(planned(job, BUDGETS[0]))
        guest.join(60)
        job.step(runner)
    assert came.is_set() and job.is_right()


def test_a_closed_runner_does_not_move() -> None:
    job = jobs.Job.chain(3, 1024)
    with Runner(job.plan, "serial") as runner:
        job.step(runner)
    with pytest.raises(StepError, match="this runner is closed"):
        runner.move_to(job.plan)
    assert job.is_right()


def test_a_runner_that_leaves_its_own_stage_closes_it() -> None:
    job = jobs.Job.chain(3, 1024)
    with (
        jobs.stage("threads") as other,
        Runner(job.plan, "threads") as runner,
    ):
        own = runner.stage
        job.step(runner)
        runner.move_to(planned(job, BUDGETS[2]), stage=other)
        with pytest.raises(StepError, match="this stage is closed"):
            own.lender.lend(runner._memory, {0: 0})
        job.step(runner)
        runner.close()
        assert other.lender.nbytes == 0
    assert job.is_right()
