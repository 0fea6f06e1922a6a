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


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_strategy_knows_what_its_steps_took_and_which_plans_they_ran(accumulated: int) -> None:
    strategy = OffloadStrategy(budget="40%")
    # 2 epochs of 5 batches of 8 and one of 4: each micro-batch is a run
    ol.train(strategy, accumulate_grad_batches=accumulated, validate=False)
    spent = strategy.spent
    assert spent.runs == 12
    assert 0 < spent.compute_seconds < spent.compute_seconds + spent.transfer_seconds
    assert spent.compute_seconds + spent.transfer_seconds < spent.seconds
    runs = {"(8, 12), (8,)": 0, "(4, 12), (4,)": 0}
    for measured in strategy.plans:
        runs[measured.inputs] += measured.spent.runs
        assert measured.part == "training_step"
        assert 0 < measured.held_bytes <= measured.plan.device_bytes
        assert measured.plan.smallest_bytes <= measured.plan.device_bytes
    assert [*runs.values()] == [10, 2]
    assert sum(one.spent.seconds for one in strategy.plans) == pytest.approx(spent.seconds)
    assert all(sum(each) > 0 for each in zip(*((m.copies, m.bytes_in, m.bytes_out)
               for m in strategy.plans), strict=True))  # fmt: skip
