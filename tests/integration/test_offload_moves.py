"""`runner.move_to`: what moves, by which way, what is refused, and what a failure leaves behind."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import stage_jobs as jobs

from offload.errors import MemoryTooSmall, StepError
from offload.memory import passages, room
from offload.memory.host_memory import HostMemoryLeft
from offload.plans.plan import plan
from offload.running.runner import Runner
from offload.running.stage import Stage

BUDGETS = (20_000, 24_000, 40_000, 60_000)


def planned(job: Any, budget: int) -> Any:
    return jobs.planned(job.graph, budget)


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


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["cuda", "cudagraph"])
def test_a_job_moves_between_budgets_and_to_the_host_and_back(engine: str) -> None:
    """Its kernels are of whole numbers, so their bits are those of every device."""
    job = jobs.Job.mixed(5, 4096, engine="cuda")
    program = replace(job.graph.program, device=torch.device("cpu"))
    here = plan(replace(job.graph, program=program), placement="copy", recompute=False)
    there = [
        plan(job.graph, budget, placement="copy", recompute=False)
        for budget in (job.plan.device_bytes, None)
    ]
    with (
        Stage(torch.device("cuda"), engine) as gpu,
        Stage() as host,
        Runner(job.plan, stage=gpu) as runner,
    ):
        job.step(runner)
        for made, stage in ((there[0], gpu), (here, host), (there[1], gpu), (there[0], gpu)):
            if stage.device != runner.stage.device:
                with pytest.warns(RuntimeWarning, match="later bits are those of the new device"):
                    moved = runner.move_to(made, stage=stage)
                assert moved.nbytes > 0
            else:
                runner.move_to(made, stage=stage)
            assert job.is_right()  # the weights are equal at the move
            job.step(runner)
    assert job.is_right()
