"""Steps whose tail runs on the host while another job has the device: bits, order, errors, ends.

one    body | tail ......        on_tail hands the stage on, tail_over takes it back
other        | body ... | tail
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support import stage_jobs as jobs

from offload.planning.host_tails import host_tail
from offload.running.runner import Runner

LONG = 60.0
"""Seconds after which a test gives up waiting."""


class Calls:
    """Notes what is called, and does what a test wants at it."""

    def __init__(self, at_tail: Callable[[], object] = tuple) -> None:
        self.log: list[str] = []
        self.at_tail = at_tail

    def on_tail(self) -> None:
        self.log.append("on_tail")
        self.at_tail()

    def tail_over(self) -> None:
        self.log.append("tail_over")


def hosted(count: int = 4, budget: int | None = 40_000, engine: str = "serial") -> Any:
    """A job with updates on the host and, unless the budget is too small, residents."""
    return jobs.Job.mixed(count, 4096, budget, engine)


@pytest.mark.parametrize("engine", jobs.ENGINES)
def test_a_step_in_two_parts_has_the_bits_of_the_step(engine: str) -> None:
    job, calls = hosted(engine=engine), Calls()
    tail = host_tail(job.plan.memgraph)
    with jobs.stage(engine) as stage, Runner(job.plan, stage=stage) as runner:
        for hooked in (True, True, False, True, True, True):
            runner.tails = calls if hooked else None
            seen = [tensor._version for tensor in job.tensors.values()]
            job.step(runner)
            assert all(t._version > n for t, n in zip(job.tensors.values(), seen, strict=True))
            assert runner.trace.whole
            if runner.tails:
                assert {"on_tail", "tail_over"} == set(calls.log)
            names = {s.row for s in runner.trace.spans if s.node in tail}
            assert tail and (engine == "serial" or names == {"host"})
        assert job.is_right()
    assert job.is_right()
    assert calls.log == ["on_tail", "tail_over"] * 5


@pytest.mark.parametrize("engine", jobs.ENGINES)
def test_while_a_tail_runs_another_job_has_the_stage(engine: str) -> None:
    """It runs whole steps in there, and parks the residents of the first one."""
    one, other = hosted(engine=engine), jobs.Job.chain(3, 1024, engine=engine)
    begun, go_on = threading.Event(), threading.Event()
    held = jobs.Held(one, host_tail(one.plan.memgraph), begun, go_on)
    with jobs.stage(engine) as stage:
        first, second = Runner(held.plan, stage=stage), Runner(other.plan, stage=stage)
        one.step(first)
        resident = jobs.on_device(first, one)
        assert resident
        for _ in range(3):
            held.hold()
            calls = first.tails = Calls()
            thread = threading.Thread(target=one.step, args=(first,))
            thread.start()
            assert begun.wait(LONG)
            while calls.log != ["on_tail"]:
                assert thread.is_alive()
            other.step(second)
            other.step(second)
            assert jobs.on_device(first, one) == [] and thread.is_alive()
            go_on.set()
            thread.join(LONG)
            assert one.is_right() and calls.log == ["on_tail", "tail_over"]
        assert sorted(jobs.waiting(first, one)) == sorted(resident)
        first.tails = None
        one.step(first)
        other.step(second)
        first.close()
        second.close()
    assert one.is_right() and other.is_right()


class Baton:
    """Who has it may use the stage and Python: one job at a time, drawn at random."""

    def __init__(self, names: list[int], seed: int) -> None:
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._alive = set(names)
        self._asking: set[int] = set()
        self._holder: int | None = None
        self.order: list[tuple[str, int]] = []

    def take(self, name: int) -> None:
        with self._changed:
            self._asking.add(name)
            self._draw()
            assert self._changed.wait_for(lambda: self._holder == name, LONG)
            self._asking.discard(name)

    def give(self, name: int, why: str) -> None:
        with self._changed:
            assert self._holder == name
            self.order.append((why, name))
            self._holder = None
            self._draw()

    def leave(self, name: int) -> None:
        with self._changed:
            self._alive.discard(name)
            self._asking.discard(name)
            if self._holder == name:
                self._holder = None
            self._draw()

    def _draw(self) -> None:
        """Once all who live ask, so that the order comes of the seed, and not of who was faster.
        A job in its tail will ask: it is waited for only now and then."""
        if self._holder is None and self._asking:
            if self._asking == self._alive or self._rng.random() < 0.5:
                self._holder = self._rng.choice(sorted(self._asking))
            elif self._asking:
                self._holder = min(self._asking)
            self._changed.notify_all()


class Turns:
    """The tails of one job with the baton."""

    def __init__(self, baton: Baton, name: int) -> None:
        self.baton, self.name = baton, name

    def on_tail(self) -> None:
        self.baton.give(self.name, "tail")

    def tail_over(self) -> None:
        self.baton.take(self.name)


@pytest.mark.parametrize("engine", jobs.ENGINES)
@pytest.mark.parametrize("count", [2, 3])
def test_jobs_that_share_a_stage_by_tails_have_the_bits_of_each_alone(
    engine: str, count: int
) -> None:
    """Steps alternate at random, with and without handing on."""
    found = [
        hosted(4, engine=engine),
        hosted(3, None, engine=engine),
        jobs.Job.chain(3, 1024, engine=engine),
    ][:count]
    baton = Baton(list(range(count)), seed=count)
    wrong: list[BaseException] = []

    def run(number: int, runner: Runner) -> None:
        draws = random.Random(number)
        try:
            for _ in range(6):
                baton.take(number)
                runner.tails = Turns(baton, number) if draws.random() < 0.8 else None
                found[number].step(runner)
                assert found[number].is_right()
                baton.give(number, "step")
        except BaseException as error:
            wrong.append(error)
            raise
        finally:
            baton.leave(number)

    with jobs.stage(engine) as stage:
        runners = [Runner(job.plan, stage=stage) for job in found]
        threads = [threading.Thread(target=run, args=given) for given in enumerate(runners)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * LONG)
        assert not wrong
        for runner in runners:
            runner.close()
    assert all(job.is_right() for job in found)
    assert {why for why, _ in baton.order} == {"tail", "step"}
    assert stage.swaps.in_bytes > 0


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", jobs.ENGINES)
def test_a_tail_that_fails_says_so_and_the_runner_can_be_used_again(engine: str) -> None:
    one, other = hosted(engine=engine), jobs.Job.chain(3, 1024, engine=engine)
    last = host_tail(one.plan.memgraph)[-1]
    handed_on = threading.Event()
    held = jobs.Held(one, [last], threading.Event(), handed_on)

    def at_tail() -> None:
        other.step(second)
        handed_on.set()

    with jobs.stage(engine) as stage:
        first, second = Runner(held.plan, stage=stage), Runner(other.plan, stage=stage)
        held.hold()
        first.tails = calls = Calls(at_tail)
        held.error = OSError("broken")
        with pytest.raises(OSError, match="broken") as told:
            first(one.batch)
        notes = "\n".join(told.value.__notes__)
        assert one.plan.memgraph.name(last) in notes and "on lane host" in notes
        assert "3 of 4 updates of this step had run" in notes
        assert calls.log == ["on_tail", "tail_over"]
        assert not first.trace.whole and len(first.trace.spans) == len(one.plan.memgraph.nodes) - 1
        held.error = None
        one.restart()
        one.step(first)
        assert one.is_right() and other.is_right() and first.trace.whole
        first.close()
        second.close()


# ---- the ends -----------------------------------------------------------------------------------


def test_a_second_thread_waits_for_the_tail_of_the_same_runner() -> None:
    job, begun, go_on = hosted(), threading.Event(), threading.Event()
    held = jobs.Held(job, host_tail(job.plan.memgraph), begun, go_on)
    done: list[int] = []

    def step(number: int) -> None:
        runner(job.batch)
        done.append(number)

    with jobs.stage("threads") as stage, Runner(held.plan, stage=stage) as runner:
        held.hold()
        runner.tails = Calls()
        threads = [threading.Thread(target=step, args=(number,)) for number in range(2)]
        threads[0].start()
        assert begun.wait(LONG)
        threads[1].start()
        threads[1].join(0.2)
        assert done == []
        go_on.set()
        for thread in threads:
            thread.join(LONG)
        for _ in range(2):
            job.plainly()
        assert sorted(done) == [0, 1] and job.is_right()
