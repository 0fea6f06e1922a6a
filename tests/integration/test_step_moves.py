"""`runner.move_to(..., in_step=True)`: a step of another thread goes on on another stage.

the step   | F1 F2 |  stop, live bytes over  | F3 B3 B2 ... on the other stage |
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from support import stage_jobs as jobs

import offload
from offload.errors import MemoryTooSmall
from offload.gate import Gate
from offload.memory import room
from offload.memory.host_memory import HostMemoryLeft
from offload.planning.cuts import live_after
from offload.running.runner import Runner
from offload.running.runner_memory import IN_STEP

ENGINES = jobs.ENGINES[:3]
"""A captured step has no place to stop."""
BUDGETS = (20_000, 24_000, 40_000, 60_000)
PATIENCE = 60.0


@contextmanager
def beside(run: Callable[[], object]) -> Iterator[None]:
    errors: list[BaseException] = []

    def kept() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=kept)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class Paused:
    """A job's plan in which one kernel waits until a move is asked for, and all are counted."""

    def __init__(self, job: Any, task: int) -> None:
        self.ran: list[int] = []
        self.begun, self.asked = threading.Event(), threading.Event()
        self._task = task
        self._waits = False
        tasks = range(len(job.graph.tasks))
        self.plan = jobs.with_kernels(job, {n: partial(self._around, n) for n in tasks})

    def pause(self) -> None:
        """The kernel waits in the next step."""
        self.ran.clear()
        self.begun.clear()
        self.asked.clear()
        self._waits = True

    def _around(self, number: int, kernel: Callable[..., None], reads: Any, writes: Any) -> None:
        self.ran.append(number)
        if self._waits and number == self._task:
            self._waits = False
            self.begun.set()
            assert self.asked.wait(PATIENCE)
        kernel(reads, writes)


def move_in_step(
    runner: Runner, paused: Paused, stage: Any, plan: Any = None, *, moved: list[Any]
) -> None:
    """Ask for the move while the kernel waits, and let it go on."""
    assert paused.begun.wait(PATIENCE)
    gate, before = runner.stage.gate, Gate.stop_step

    def stop(self: Gate) -> None:
        before(self)
        paused.asked.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "stop_step", partial(stop, gate))
        try:
            moved.append(runner.move_to(plan or paused.plan, stage=stage, in_step=True))
        finally:
            paused.asked.set()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("budget", [BUDGETS[0], BUDGETS[3]])
def test_a_step_goes_on_on_another_stage_from_any_of_its_kernels(engine: str, budget: int) -> None:
    job = jobs.Job.mixed(5, 4096, budget, engine=engine)
    ways = []
    for task in range(len(job.graph.tasks) - 1):
        paused = Paused(job, task)
        moved: list[Any] = []
        with (
            jobs.stage(engine) as one,
            jobs.stage(engine) as other,
            Runner(paused.plan, stage=one, poison=True) as runner,
        ):
            for here, there in ((one, other), (other, one)):
                assert runner.stage is here
                paused.pause()
                ask = partial(move_in_step, runner, paused, there, moved=moved)
                with beside(ask):
                    job.step(runner)
                assert runner.stage is there and here.arena_bytes == 0
                assert sorted(paused.ran) == list(range(len(job.graph.tasks)))
                spans = sorted(span.node for span in runner.trace.spans)
                assert spans == list(range(len(paused.plan.memgraph.nodes)))
                job.step(runner)
            ways += [one.way for one in moved]
            assert all(one.seconds > 0 for one in moved)
        assert job.is_right()
    # While a kernel of the host waits, the last one of the device may be over.
    assert ways.count(IN_STEP) >= len(ways) // 2, ways


@pytest.mark.parametrize("engine", ENGINES)
def test_moves_at_any_moment_keep_the_bits_and_lose_no_step(engine: str) -> None:
    """Steps, moves in a step and between two, to other budgets and back, as they come."""
    job = jobs.Job.mixed(6, 4096, BUDGETS[1], engine=engine)
    plans = [jobs.planned(job.graph, budget) for budget in BUDGETS]
    chance, over = random.Random(engine), threading.Event()
    ways: list[str] = []
    with (
        jobs.stage(engine) as one,
        jobs.stage(engine) as other,
        Runner(plans[1], stage=one, poison=True) as runner,
    ):

        def moves() -> None:
            now = plans[1]
            while not over.is_set():
                in_step = chance.random() < 0.8
                now = now if in_step else chance.choice(plans)
                while in_step and runner._step_moves._runs_on is None and not over.is_set():
                    time.sleep(1e-4)  # who asks as soon as it has moved is always between two steps
                stage = other if runner.stage is one else one
                ways.append(runner.move_to(now, stage=stage, in_step=in_step).way)

        with beside(moves):
            try:
                steps = 0
                while ways.count(IN_STEP) < 10 and steps < 500:
                    job.step(runner)
                    steps += 1
                    spans = sorted(span.node for span in runner.trace.spans)
                    assert spans == list(range(len(spans)))
            finally:
                over.set()
        assert ways.count(IN_STEP) >= 10
    assert job.is_right()


def test_only_what_is_still_needed_moves() -> None:
    job = jobs.Job.chain(6, 4096, BUDGETS[3])
    paused = Paused(job, 2)
    moved: list[Any] = []
    with (
        jobs.stage("serial") as one,
        jobs.stage("serial") as other,
        Runner(paused.plan, stage=one) as runner,
    ):
        paused.pause()
        with beside(partial(move_in_step, runner, paused, other, moved=moved)):
            job.step(runner)
    nodes = paused.plan.memgraph.nodes
    at = next(n for n, node in enumerate(nodes) if node.kind == "task" and node.task == 2)
    live = sum(place.nbytes for place in live_after(paused.plan.memgraph, range(at + 1)))
    assert moved[0].nbytes == live < paused.plan.memgraph.arenas[0]
    assert job.is_right()


def test_without_room_the_step_goes_on_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.Job.chain(5, 4096, BUDGETS[1])
    paused = Paused(job, 2)
    struck: list[str] = []

    def ask() -> None:
        with pytest.raises(MemoryTooSmall, match="Nothing has moved") as error:
            move_in_step(runner, paused, other, moved=[])
        struck.append(str(error.value))

    with (
        jobs.stage("threads") as one,
        jobs.stage("threads") as other,
        Runner(paused.plan, stage=one, poison=True) as runner,
    ):
        job.step(runner)
        monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(1000, "a small host"))
        paused.pause()
        with beside(ask):
            job.step(runner)
        assert runner.stage is one and other.arena_bytes == 0
        assert sorted(paused.ran) == list(range(len(job.graph.tasks)))
        monkeypatch.undo()
        job.step(runner)
    assert struck and job.is_right()


@pytest.mark.parametrize("what", ["plan", pytest.param("cudagraph", marks=pytest.mark.gpu)])
def test_what_cannot_go_on_in_a_step_moves_after_it(what: str) -> None:
    """Another plan has other places; a captured graph has no place to stop."""
    here, engine = ("cuda", "cudagraph") if what == "cudagraph" else ("serial", "serial")
    job = jobs.Job.chain(5, 4096, BUDGETS[1], engine)
    other_plan = jobs.planned(job.graph, BUDGETS[3])
    paused = Paused(job, 2)
    moved: list[Any] = []
    with (
        jobs.stage(here) as one,
        jobs.stage(engine) as other,
        Runner(paused.plan, stage=one) as runner,
    ):
        plan = other_plan if what == "plan" else None
        paused.pause()
        with beside(partial(move_in_step, runner, paused, other, plan, moved=moved)):
            job.step(runner)
        assert moved[0].way != IN_STEP and runner.stage is other
        job.step(runner)
    assert job.is_right()


def test_where_no_step_runs_it_moves_at_once() -> None:
    job = jobs.Job.chain(4, 4096, BUDGETS[1])
    with (
        jobs.stage("serial") as one,
        jobs.stage("serial") as other,
        Runner(job.plan, stage=one) as runner,
    ):
        job.step(runner)
        assert runner.move_to(job.plan, stage=other, in_step=True).way == "beside"
        job.step(runner)
    assert job.is_right()


def test_an_error_of_a_copy_that_was_under_way_is_not_lost() -> None:
    """The step is stopped while a kernel of another thread fails: it fails, and does not move."""
    job = jobs.Job.mixed(5, 4096, BUDGETS[1])
    paused = Paused(job, 3)
    memgraph = paused.plan.memgraph
    hosted = next(n for n, task in enumerate(memgraph.graph.tasks) if task.lane == "host")
    before = paused._around
    failed = threading.Event()

    def around(number: int, kernel: Any, reads: Any, writes: Any) -> None:
        if number == hosted and paused.begun.is_set():
            failed.set()
            raise ValueError("this kernel fails")
        before(number, kernel, reads, writes)

    plan = jobs.with_kernels(job, {n: partial(around, n) for n in range(len(job.graph.tasks))})
    with (
        jobs.stage("threads") as one,
        jobs.stage("threads") as other,
        Runner(plan, stage=one) as runner,
    ):
        paused.plan = plan
        paused.pause()

        def ask() -> None:
            move_in_step(runner, paused, other, moved=[])

        with beside(ask), pytest.raises(ValueError, match="this kernel fails"):
            job.step(runner)
        assert failed.is_set()


def test_a_runner_that_leaves_its_own_stage_in_a_step_closes_it() -> None:
    job = jobs.Job.chain(5, 4096, BUDGETS[1])
    paused = Paused(job, 2)
    moved: list[Any] = []
    with jobs.stage("threads") as other, Runner(paused.plan, "threads") as runner:
        own = runner.stage
        paused.pause()
        with beside(partial(move_in_step, runner, paused, other, moved=moved)):
            job.step(runner)
        assert moved[0].way == IN_STEP
        with pytest.raises(offload.StepError, match="this stage is closed"):
            own.lent(runner._memory, {0: 0})
        job.step(runner)
    assert job.is_right()


def test_guests_have_the_old_device_as_soon_as_the_bytes_are_gone() -> None:
    """The step still runs, on the other stage, when a guest of the old one is let in."""
    job = jobs.Job.chain(5, 4096, BUDGETS[1])
    paused = Paused(job, 2)
    came: list[bool] = []
    over = threading.Event()
    with (
        jobs.stage("serial") as one,
        jobs.stage("serial") as other,
        Runner(paused.plan, stage=one) as runner,
    ):
        before = paused._around

        def last(number: int, kernel: Any, reads: Any, writes: Any) -> None:
            if number == len(job.graph.tasks) - 1 and runner.stage is other:

                def visit() -> None:
                    with one.gate.granted():
                        came.append(not over.is_set())

                with beside(visit):
                    pass
            before(number, kernel, reads, writes)

        plan = jobs.with_kernels(job, {n: partial(last, n) for n in range(len(job.graph.tasks))})
        runner.move_to(plan)
        paused.plan = plan
        paused.pause()
        with beside(partial(move_in_step, runner, paused, other, moved=[])):
            job.step(runner)
            over.set()
    assert came == [True] and job.is_right()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_that_is_on_the_other_stage_makes_way_and_goes_on(engine: str) -> None:
    job, host = (
        jobs.Job.mixed(5, 4096, BUDGETS[1], engine=engine),
        jobs.Job.chain(8, 8192, engine=engine),
    )
    paused = Paused(job, 1)
    moved: list[Any] = []
    with (
        jobs.stage(engine) as one,
        jobs.stage(engine) as other,
        Runner(host.plan, stage=other) as there,
        Runner(paused.plan, stage=one, poison=True) as runner,
    ):
        host.step(there)
        paused.pause()
        with beside(partial(move_in_step, runner, paused, other, moved=moved)):
            job.step(runner)
        assert moved[0].way == IN_STEP
        assert jobs.waiting(there, host) and not jobs.on_device(there, host)
        for _ in range(2):
            host.step(there)
            job.step(runner)
    assert job.is_right() and host.is_right()
