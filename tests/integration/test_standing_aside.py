"""A step stands aside between two of its nodes, and steps of other jobs run on its stage."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from support import stage_jobs as jobs

from offload.errors import MemoryTooSmall
from offload.running.runner import Runner
from offload.running.stage import Stage


@contextmanager
def bystander(stage: Stage, meanwhile: Callable[[], object]) -> Iterator[list[int]]:
    """Call `meanwhile` in a thread of its own whenever a step's nodes run, in the middle of it. The
    list has the number of calls."""
    calls, over, errors = [0], threading.Event(), []

    def ask() -> None:
        try:
            while not over.is_set():
                with stage.gate.granted(inside=True):
                    if stage.step_thread is not None:
                        with stage.let_others_step() as copies:
                            with suppress(MemoryError):
                                copies.make()
                            meanwhile()
                        calls[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield calls
    finally:
        over.set()
        stage.gate.close()  # lets a guest in for whom no step comes any more
        thread.join()
    assert not errors, errors


def fill(stage: Stage) -> None:
    """Write over the whole arena, as another job may."""
    assert stage.lender.arena is not None
    for region in stage.lender.arena.regions.values():
        region.tensor.fill_(0xA5)


@pytest.mark.parametrize("engine", jobs.ENGINES)
def test_steps_of_another_job_in_the_middle_of_a_step_change_no_bit(engine: str) -> None:
    one, other = (
        jobs.Job.chain(6, 4096, 40_000, engine=engine),
        jobs.Job.mixed(4, 4096, 24_000, engine=engine),
    )
    with jobs.stage(engine) as stage:
        stage.gate.armed = True
        runner = Runner(one.plan, stage=stage)
        one.step(runner)
        between: list[Runner] = []
        rounds = [0]

        def meanwhile() -> None:
            fill(stage)
            if not between:
                between.append(Runner(other.plan, stage=stage))
            other.step(between[0])
            rounds[0] += 1
            if rounds[0] % 3 == 0:
                between.pop().close()

        with bystander(stage, meanwhile) as calls:
            for _ in range(12):
                one.step(runner)
        assert calls[0] >= 6
        if between:
            other.step(between[0])
            between[0].close()
        one.step(runner)
        runner.close()
    assert one.is_right() and other.is_right()


def test_the_job_that_comes_in_between_cannot_have_a_larger_arena() -> None:
    one, larger = jobs.Job.chain(4, 4096, 24_000), jobs.Job.chain(4, 1 << 16, 1 << 20)
    found: list[str] = []
    with jobs.stage("threads") as stage:
        runner = Runner(one.plan, stage=stage)

        def meanwhile() -> None:
            with pytest.raises(MemoryTooSmall) as raised:
                Runner(larger.plan, stage=stage)
            found.append(str(raised.value))

        with bystander(stage, meanwhile):
            for _ in range(5):
                one.step(runner)
        assert found and "as long as another step stands aside" in found[0]
        later = Runner(larger.plan, stage=stage)  # between two steps it may
        larger.step(later)
        one.step(runner)
        later.close()
        runner.close()
    assert one.is_right() and larger.is_right()


def test_a_job_that_leaves_meanwhile_leaves_the_arena_to_the_step() -> None:
    one, other = jobs.Job.chain(4, 4096, 24_000), jobs.Job.chain(3, 4096, 20_000)
    with jobs.stage("threads") as stage:
        runner, leaver = Runner(one.plan, stage=stage), Runner(other.plan, stage=stage)
        one.step(runner)
        other.step(leaver)
        with bystander(stage, leaver.close):
            for _ in range(3):
                one.step(runner)
        runner.close()
    assert one.is_right() and other.is_right()


def test_a_step_that_fails_in_between_leaves_the_other_one_whole() -> None:
    one, failing = jobs.Job.chain(4, 4096, 24_000), jobs.Job.chain(3, 4096, 20_000)
    held = jobs.Held(failing, range(2))
    held.error = ValueError("this kernel fails")
    with jobs.stage("threads") as stage:
        runner = Runner(one.plan, stage=stage)
        failures: list[int] = []

        def meanwhile() -> None:
            with (
                pytest.raises(ValueError, match="this kernel fails"),
                Runner(held.plan, stage=stage) as between,
            ):
                between(failing.batch)
            failures.append(1)

        with bystander(stage, meanwhile):
            for _ in range(4):
                one.step(runner)
        runner.close()
    assert failures and one.is_right()
