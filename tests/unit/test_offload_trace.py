"""What a trace and a meter make of steps that never ran: times and records by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from offload import GraphBuilder, Plan, plan
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, Access, Block, MemGraph, Node, Place
from offload.graph.taskgraph import HOST
from offload.running.engines.work import LaneRecord, Record
from offload.running.trace import Trace
from trainers.steps.meter import LATEST, Meter


def memgraph() -> MemGraph:
    """w is reloaded, `forward` makes y of it with a workspace, y is offloaded."""
    builder = GraphBuilder()
    w, y = builder.buffer("w", 100, "parameter"), builder.buffer("y", 200)
    builder.task("forward", [w], [y], where="model.py:3 in forward", workspace=50)
    graph = builder.graph()
    at_home, w0 = Place(HOST, 0, 100), Place(0, 0, 100)
    y0, work, y_home = Place(0, 128, 200), Place(0, 384, 50), Place(HOST, 128, 200)
    nodes = (
        Node("reload", "h2d", (Access(at_home, w, True, False), Access(w0, w, False, True)), (),
             task=0, buffer=w, nbytes=100),
        Node(TASK, "compute", (Access(w0, w, True, False), Access(y0, y, False, True),
                               Access(work, None, False, True)), (0,), task=0),
        Node("offload", "d2h", (Access(y0, y, True, False), Access(y_home, y, False, True)), (1,),
             task=0, buffer=y, nbytes=200),
    )  # fmt: skip
    blocks = (
        Block(at_home, w, (0,), from_start=True, to_end=True),
        Block(w0, w, (0, 1)),
        Block(y0, y, (1, 2)),
        Block(work, None, (1,)),
        Block(y_home, y, (2,), to_end=True),
    )
    return MemGraph(graph, nodes, {0: 448, HOST: 384}, {w: at_home}, {y: y_home}, blocks, {})


def record() -> Record:
    return Record(
        [
            LaneRecord("compute", [1], [11.0], [14.0]),
            LaneRecord("h2d", [0], [10.0], [10.5]),
            LaneRecord("d2h", [2], [14.5], [15.0]),
        ]
    )


def test_the_file_has_a_row_a_lane_and_an_event_a_node(tmp_path: Path) -> None:
    Trace(memgraph(), record()).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {*rows.values()} == {"compute", "h2d", "d2h"}
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert {*spans} == {"reload w", "forward", "offload y"}
    assert [e["name"] for e in events if e["name"] == "process_name"]
    forward = spans["forward"]
    assert rows[forward["tid"]] == "compute"
    assert (forward["ts"], forward["dur"]) == (1e6, 3e6)
    assert forward["args"]["where"] == "model.py:3 in forward"
    assert spans["reload w"]["args"]["bytes"] == 100
    assert spans["reload w"]["args"]["at"] == [
        "w r host [0, 100)",
        "w w device 0 [0, 100)",
    ]
    assert "workspace w device 0 [384, 434)" in forward["args"]["at"]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"bytes in use on device 0"}


def test_bytes_in_use_rise_with_the_first_touch_and_fall_with_the_last() -> None:
    curve = Trace(memgraph(), record()).bytes_in_use()
    assert curve == [
        (10.0, 0, 100),
        (11.0, 0, 150),
        (11.0, 0, 350),
        (14.0, 0, 250),
        (14.0, 0, 200),
        (15.0, 0, 0),
    ]


def test_a_step_that_failed_is_traced_up_to_there(tmp_path: Path) -> None:
    lanes = [LaneRecord("h2d", [0], [10.0], [10.5]), LaneRecord("compute", [1], [11.0], [])]
    trace = Trace(memgraph(), Record(lanes, failed=1))
    trace.save(tmp_path / "trace.json")
    assert [span.node for span in trace.spans] == [0]
    assert trace.bytes_in_use() == [(10.0, 0, 100)]
    assert Record(lanes).finished == [0]


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
