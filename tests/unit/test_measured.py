"""What a meter makes of runs, on a clock and with records by hand."""

from typing import Any

import pytest

from offload import GraphBuilder, Plan, plan
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK
from offload.running.engines.work import LaneRecord, Record
from offload.running.trace import Trace
from trainers.steps.meter import LATEST, Meter


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Meter:
    meter = Meter(clock)
    meter.add("a", made(), "(8, 3)", "whole step")
    return meter


def made(budget: int | None = None) -> Plan:
    """Two weights, of which one fits at a time beside what is made of it."""
    builder = GraphBuilder()
    total = builder.buffer("x", 4096, "input")
    for name in "vw":
        weight, made = builder.buffer(name, 4096, "parameter"), builder.buffer(f"of {name}", 4096)
        builder.task(f"use {name}", [total, weight], [made], kernel=lambda reads, writes: None)
        total = made
    builder.output(total)
    return plan(builder.graph(), budget)


def run(meter: Meter, clock: Clock, seconds: float, key: Any = "a", record: Any = None) -> None:
    begun = meter.begin()
    clock.now += seconds
    record = record or Record([LaneRecord("compute", [0], [1.0], [1.5])], waited=0.25)
    meter.ran(key, begun, Trace(None, record))


def test_what_runs_took_is_added_up(meter: Meter, clock: Clock) -> None:
    record = Record(
        [
            LaneRecord("compute", [0, 2], [1.0, 4.0], [2.0, 4.5]),
            LaneRecord("h2d", [1], [1.0], [9.0]),
        ],
        waited=2.0,
    )
    run(meter, clock, 5.0, record=record)
    run(meter, clock, 1.0)
    spent = meter.spent
    assert (spent.runs, spent.plans) == (2, 1)
    assert (spent.seconds, spent.compute_seconds, spent.transfer_seconds) == (6.0, 2.0, 2.25)


def test_a_node_that_did_not_end_counts_for_nothing(meter: Meter, clock: Clock) -> None:
    run(meter, clock, 1.0, record=Record([LaneRecord("compute", [0, 1], [1.0, 2.0], [1.5])]))
    assert meter.spent.compute_seconds == 0.5


def test_planning_is_no_part_of_a_run(meter: Meter, clock: Clock) -> None:
    with meter.planning():
        clock.now += 7.0
    run(meter, clock, 1.0)
    assert (meter.spent.planning_seconds, meter.spent.seconds) == (7.0, 1.0)


def test_planning_that_fails_took_its_time_too(meter: Meter, clock: Clock) -> None:
    with pytest.raises(ValueError, match="no"), meter.planning():
        clock.now += 7.0
        raise ValueError("no")
    assert meter.spent.planning_seconds == 7.0


def test_a_median_is_of_the_latest_runs(clock: Clock) -> None:
    meter = Meter(clock)
    whole = made()
    meter.add("a", whole, "(8, 3)", "whole step")
    record = Record([LaneRecord("compute", [0, 1], [0.0, 1.0], [1.0, 2.0])])
    for seconds in [9.0] * LATEST + [1.0] * (LATEST // 2 + 1):
        begun = meter.begin()
        clock.now += seconds
        meter.ran("a", begun, Trace(whole.memgraph, record))
    [measured] = meter.plans
    assert measured.median_seconds == 1.0
    assert measured.spent.runs == LATEST + LATEST // 2 + 1


def test_a_plan_is_told_with_its_copies_and_what_it_held(clock: Clock) -> None:
    tight = made(3 * 4096)
    kinds = [node.kind for node in tight.memgraph.nodes]
    # Batch and weights come in once each; clean weights are dropped.
    assert kinds.count(RELOAD) == 3 and kinds.count(OFFLOAD) == 0
    lane = LaneRecord("", list(range(len(kinds))), [*map(float, range(len(kinds)))], [])
    lane.ends = [start + 1.0 for start in lane.starts]
    meter = Meter(clock)
    meter.add("a", tight, "(8, 3)", "whole step")
    meter.add("b", made(), "(9, 3)", "whole step")  # has not run
    meter.ran("a", meter.begin(), Trace(tight.memgraph, Record([lane])))
    [measured] = meter.plans
    assert (measured.copies, measured.bytes_in, measured.bytes_out) == (3, 3 * 4096, 0)
    assert measured.held_bytes == 3 * 4096
    assert measured.spent.compute_seconds == kinds.count(TASK)
    assert meter.spent.plans == 2


def test_a_plan_that_is_forgotten_leaves_what_it_took(meter: Meter, clock: Clock) -> None:
    run(meter, clock, 3.0)
    meter.forget("a")
    assert meter.plans == ()
    assert meter.spent.seconds == 3.0
