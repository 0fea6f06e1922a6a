"""Several runners on one stage: each has the bits that it has alone, whoever is in between.

one .. other .. one .. other       hand-overs; each parks the job before it on the host
"""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from support import stage_jobs as jobs

from offload.errors import MemoryTooSmall, StepError
from offload.memory import room
from offload.memory.homes import Home
from offload.memory.host_memory import HostMemoryLeft
from offload.running.engines.work import Record, StepWork
from offload.running.runner import Runner
from offload.running.stage import Stage


@pytest.mark.parametrize("engine", jobs.ENGINES)
def test_two_jobs_that_take_turns_have_the_bits_of_each_alone(engine: str) -> None:
    one, other = (
        jobs.Job.chain(4, 4096, 24_000, engine=engine),
        jobs.Job.chain(3, 1024, engine=engine),
    )
    with jobs.stage(engine) as stage:
        first, second = Runner(one.plan, stage=stage), Runner(other.plan, stage=stage)
        for turn in (one, other, one, one, other, other, one):
            turn.step(first if turn is one else second)
        first.close()
        second.close()
    assert one.is_right() and other.is_right()


@pytest.mark.parametrize("runners", [1, 2])
def test_steps_of_two_threads_take_turns_on_a_stage(runners: int) -> None:
    both = [jobs.Job.chain(2, 1024) for _ in range(runners)]
    running: list[int] = []
    together: list[bool] = []
    met = threading.Event()
    with jobs.stage("serial") as stage:
        run_nodes = stage.run

        def run(work: StepWork, record: Record) -> None:
            running.append(1)
            if len(running) > 1:
                met.set()
            together.append(met.wait(0.3))  # the other thread has the time to come in
            run_nodes(work, record)
            running.pop()

        stage.run = run  # type: ignore[method-assign]
        tenants = [(Runner(job.plan, stage=stage), job.batch) for job in both]
        callers = [
            threading.Thread(target=runner, args=(batch,))
            for runner, batch in tenants * (2 // runners)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        for runner, _ in tenants:
            runner.close()
    assert together == [False, False]


@pytest.mark.parametrize("there", ["large", "small"])
def test_the_arena_shrinks_when_the_largest_job_leaves(there: str) -> None:
    """`there`: whose residents are in the arena when the largest job leaves."""
    small, large = jobs.Job.chain(3, 1024), jobs.Job.chain(6, 4096)
    with jobs.stage("threads") as stage:
        first, second = Runner(small.plan, stage=stage), Runner(large.plan, stage=stage)
        for _ in range(2):
            small.step(first)
            large.step(second)
        if there == "small":
            small.step(first)
        assert stage.lender.nbytes == large.plan.device_bytes > small.plan.device_bytes
        second.close()
        assert stage.lender.nbytes in (0, small.plan.device_bytes)
        small.step(first)
        assert stage.lender.nbytes == small.plan.device_bytes
        first.close()
        assert stage.lender.nbytes == 0
    assert small.is_right() and large.is_right()


@pytest.mark.parametrize("leaver", ["parked", "present"])
def test_a_job_that_leaves_touches_nothing_of_the_other(leaver: str) -> None:
    """Leaving gives pages back to the machine: never those of a tenant that is there now."""
    one, other = jobs.Job.chain(4, 64_000, 400_000), jobs.Job.chain(4, 64_000, 400_000)
    with jobs.stage("threads") as stage:
        first, second = Runner(one.plan, stage=stage), Runner(other.plan, stage=stage)
        one.step(first)
        other.step(second)
        gone, stays = (first, second) if leaver == "parked" else (second, first)
        gone.close()
        left, job = (one, other) if leaver == "parked" else (other, one)
        assert left.is_right() and job.is_right()
        job.step(stays)
        assert job.is_right()
        with pytest.raises(StepError, match="closed"):
            left.step(gone)
        stays.close()


@pytest.mark.parametrize("engine", jobs.ENGINES)
def test_a_stage_that_closes_leaves_every_value_with_its_owner(engine: str) -> None:
    one = jobs.Job.chain(4, 4096, 24_000, engine=engine)
    other = jobs.Job.chain(3, 1024, engine=engine)
    stage = jobs.stage(engine)
    first, second = Runner(one.plan, stage=stage), Runner(other.plan, stage=stage)
    one.step(first)
    other.step(second)
    stage.close()
    stage.close()
    assert one.is_right() and other.is_right()
    with pytest.raises(StepError, match="stage is closed"):
        first(one.batch)
    first.close()
    second.close()
    assert one.is_right() and other.is_right()


def test_what_a_stage_decides_cannot_be_asked_of_its_tenant() -> None:
    job = jobs.Job.chain(2, 1024)
    with jobs.stage("serial") as stage:
        with pytest.raises(ValueError, match="engine='threads' has no effect beside a stage"):
            Runner(job.plan, "threads", stage=stage)
        with pytest.raises(ValueError, match="host_workers=2 has no effect"):
            Runner(job.plan, host_workers=2, stage=stage)
    elsewhere = Stage.__new__(Stage)
    elsewhere.device = torch.device("cuda")
    with pytest.raises(ValueError, match="captured on cpu, the stage has cuda"):
        Runner(job.plan, stage=elsewhere)


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
    one, first, other, second, [name, *_] = pair
    one.tensors[name].data = one.tensors[name].data.clone()  # so each comes by itself
    brought: list[str] = []
    bring = Home.bring

    def once(home: Any, live: Any, **more: Any) -> None:
        if brought:
            raise KeyboardInterrupt
        brought.append(home.key)
        bring(home, live, **more)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Home, "bring", once)
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
