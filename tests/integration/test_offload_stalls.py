"""Seconds in which the compute lane could not run: on a clock that only kernels move."""

import threading
from collections.abc import Callable

import pytest
from support import offload_lightning as ol

from offload.running.engines.serial import Serial
from offload.running.engines.threads import Threads
from offload.running.engines.work import Record, StepWork
from offload.running.trace import Trace
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


class Clock:
    """Stands still unless a kernel moves it; knows how often the caller looked at it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.looks = 0
        self._caller = threading.current_thread()
        self._looked = threading.Condition()

    def __call__(self) -> float:
        with self._looked:
            if threading.current_thread() is self._caller:
                self.looks += 1
                self._looked.notify_all()
            return self.now

    def take(self, seconds: float, looks: int = 0) -> None:
        """After so many looks of the caller."""
        with self._looked:
            assert self._looked.wait_for(lambda: self.looks >= looks, timeout=60)
            self.now += seconds


def work(runs: list[Callable[[], object]]) -> StepWork:
    """A copy in, a kernel, a copy out: each waits for the one before."""
    return StepWork(runs, ("h2d", "compute", "d2h"), (0, 1, 1), ((1,), (2,), ()), (0,),
                ("h2d", "compute", "d2h"))  # fmt: skip


def test_the_compute_lane_waits_before_its_first_kernel_and_after_its_last() -> None:
    clock, record = Clock(), Record()
    seen: list[int] = []

    def kernel() -> None:
        seen.append(clock.looks)
        clock.take(2.0)

    engine = Threads(clock=clock)
    engine.run(
        work(
            [
                lambda: clock.take(5.0, looks=1),  # the caller waits now
                kernel,
                lambda: clock.take(3.0, looks=seen[0] + 2),  # its kernel is over, and it waits
            ]
        ),
        record,
    )
    engine.close()
    assert record.waited == 8.0
    assert Trace(record=record).computed == 2.0


def test_of_one_node_after_the_other_all_that_is_no_kernel_is_waited_for() -> None:
    clock, record = Clock(), Record()
    Serial(clock=clock).run(work([lambda s=s: clock.take(s) for s in (5.0, 2.0, 3.0)]), record)
    assert record.waited == 8.0


def test_a_strategy_knows_what_its_steps_took_and_which_plans_they_ran() -> None:
    strategy = OffloadStrategy(budget="40%")
    ol.train(strategy)  # 2 epochs of 5 batches of 8 and one of 4
    spent = strategy.spent
    assert (spent.runs, spent.plans) == (12, 2)
    assert 0 < spent.compute_seconds < spent.compute_seconds + spent.transfer_seconds
    assert spent.compute_seconds + spent.transfer_seconds < spent.seconds
    whole, rest = strategy.plans
    assert [(p.inputs, p.part, p.spent.runs) for p in (whole, rest)] == [
        ("(8, 12) (8,)", "whole step", 10),
        ("(4, 12) (4,)", "whole step", 2),
    ]
    assert whole.spent.seconds + rest.spent.seconds == pytest.approx(spent.seconds)
    for measured in (whole, rest):
        assert 0 < measured.held_bytes <= measured.plan.device_bytes
        assert measured.copies > 0 and measured.bytes_in > 0 and measured.bytes_out > 0
        assert measured.plan.smallest_bytes <= measured.plan.device_bytes


def test_micro_batches_are_runs_of_their_own() -> None:
    strategy = OffloadStrategy()
    ol.train(strategy, accumulate_grad_batches=2)
    assert [(p.part, p.spent.runs) for p in strategy.plans] == [
        ("first micro-batch", 6),
        ("last micro-batch", 4),
        ("last micro-batch", 2),  # of 4 samples
    ]
