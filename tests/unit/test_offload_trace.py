"""A trace of a step that never ran: times by hand."""

import json
from pathlib import Path

import pytest

from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import TASK, Access, Block, MemGraph, Node, Place
from offload.graph.taskgraph import HOST
from offload.running.engines.work import LaneRecord, Record
from offload.running.trace import Trace


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


def test_measured_seconds_are_by_row() -> None:
    trace = Trace(memgraph(), record())
    assert trace.busy() == {"compute": 3.0, "h2d": 0.5, "d2h": 0.5}
    assert trace.seconds == 5.0
    assert [span.node for span in trace.spans] == [0, 1, 2]


def test_an_engine_whose_one_thread_is_all_lanes_has_the_rows_of_its_nodes() -> None:
    stamps = [10.0, 10.5, 13.0, 14.0]
    trace = Trace(memgraph(), Record([LaneRecord("", [0, 1, 2], stamps, stamps[1:])]))
    assert trace.busy() == {"h2d": 0.5, "compute": 2.5, "d2h": 1.0}


def test_a_step_that_failed_is_traced_up_to_there(tmp_path: Path) -> None:
    lanes = [LaneRecord("h2d", [0], [10.0], [10.5]), LaneRecord("compute", [1], [11.0], [])]
    trace = Trace(memgraph(), Record(lanes, failed=1))
    trace.save(tmp_path / "trace.json")
    assert [span.node for span in trace.spans] == [0]
    assert trace.bytes_in_use() == [(10.0, 0, 100)]
    assert Record(lanes).finished == [0]


def test_a_trace_of_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="run a step first"):
        Trace(record=record()).bytes_in_use()
    assert Trace().busy() == {} and Trace().seconds == 0.0
