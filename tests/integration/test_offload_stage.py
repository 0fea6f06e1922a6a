"""Several runners on one stage: each has the bits that it has alone, whoever is in between."""

import threading

import pytest
import torch
from support import stage_jobs as jobs

from offload.errors import StepError
from offload.graph.taskgraph import HOST
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


def test_a_parked_job_keeps_its_host_arena_and_has_nothing_on_the_device() -> None:
    one, other = jobs.Job.chain(4, 4096, 24_000), jobs.Job.chain(3, 1024)
    with jobs.stage("threads") as stage:
        first = Runner(one.plan, stage=stage)
        one.step(first)
        resident = jobs.on_device(first, one)
        at = {n: t.data_ptr() for n, t in one.tensors.items() if n not in resident}
        assert resident and at
        second = Runner(other.plan, stage=stage)
        other.step(second)
        assert jobs.on_device(second, one) == [] and jobs.on_device(second, other)
        assert {n: one.tensors[n].data_ptr() for n in at} == at
        assert one.is_right()
        one.step(first)
        assert jobs.on_device(first, one) == resident and jobs.on_device(first, other) == []
        first.close()
        second.close()


def test_the_arena_grows_for_the_largest_job_and_is_taken_once() -> None:
    small, large = jobs.Job.chain(2, 1024), jobs.Job.chain(6, 4096)
    with jobs.stage("serial") as stage:
        first = Runner(small.plan, stage=stage)
        small.step(first)
        second = Runner(large.plan, stage=stage)
        large.step(second)
        assert stage.lender.arena is not None
        arena = stage.lender.arena
        assert arena.sizes[0] == large.plan.memgraph.arenas[0]
        small.step(first)
        large.step(second)
        assert stage.lender.arena is arena
        first.close()
        second.close()
        assert stage.lender.arena is None
    assert small.is_right() and large.is_right()


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


def test_the_device_arena_and_the_host_arena_are_two_objects() -> None:
    job = jobs.Job.chain(4, 4096, 24_000)
    with Runner(job.plan, "serial") as runner:
        job.step(runner)
        arenas = runner._memory.arenas
        assert arenas is not None and arenas.lent is runner.stage.lender.arena
        assert arenas.host is runner._memory.host and HOST not in arenas.lent.regions
    assert job.is_right()
