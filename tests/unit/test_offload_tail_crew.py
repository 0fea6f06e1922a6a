"""The threads of a tail: what waits for what, what is written down, what an error ends."""

import threading
from collections.abc import Callable

import pytest

from offload.running.engines.serial import Serial
from offload.running.engines.tail_crew import TailCrew
from offload.running.engines.work import Record, StepWork

LONG = 60.0


def work(lanes: str, deps: list[list[int]], run: Callable[[int], None]) -> StepWork:
    """`lanes`: c for compute, h for the host, by node."""
    names = ["compute" if lane == "c" else "host" for lane in lanes]
    successors: list[list[int]] = [[] for _ in names]
    for node, before in enumerate(deps):
        for dep in before:
            successors[dep].append(node)
    return StepWork(
        runs=[lambda node=node: run(node) for node in range(len(names))],
        lane_of=names,
        waits=[len(before) for before in deps],
        successors=successors,
        first=[node for node, before in enumerate(deps) if not before],
        lanes=tuple(dict.fromkeys(names)),
    )


class Case:
    """c0 -> h1 -> h2, c0 -> h3, c4: where h3 lets h1 go on, and c4 comes last on the device."""

    def __init__(self, fails: int = -1) -> None:
        self.log: list[str] = []
        self.fails = fails
        self.third = threading.Event()
        self.work = work("chhhc", [[], [0], [1], [0], [0]], self.run)

    def run(self, node: int) -> None:
        self.log.append(f"begin {node}")
        if node == 1:
            assert self.third.wait(LONG)
        if node == 3:
            self.third.set()
        if node == self.fails:
            raise OSError("broken")
        self.log.append(f"end {node}")


def test_nodes_of_a_tail_wait_for_the_body_and_for_each_other() -> None:
    case, crew, record = Case(), TailCrew(host_workers=2), Record()
    split = crew.split(case.work, (1, 2, 3))
    for _ in range(2):
        case.log.clear()
        case.third.clear()
        record = Record()
        crew.begin(split)
        Serial().run(split.body, record)
        crew.finish(split, record)
        crew.end(split, record)
        crew.end(split, record)
        assert case.log.index("end 1") < case.log.index("begin 2")
        assert case.log.index("end 0") < min(map(case.log.index, ("begin 1", "begin 3")))
        assert sorted(record.finished) == [0, 1, 2, 3, 4]
        by_lane = {ran.name: ran.nodes for ran in record.lanes}
        assert by_lane[""] == [0, 4] and sorted(by_lane["host-0"] + by_lane["host-1"]) == [1, 2, 3]
        assert all(len(ran.nodes) == len(ran.ends) for ran in record.lanes)
    crew.close()


def test_an_error_of_a_tail_ends_it_and_names_the_node_of_the_step() -> None:
    case, crew, record = Case(fails=1), TailCrew(host_workers=2), Record()
    split = crew.split(case.work, (1, 2, 3))
    crew.begin(split)
    Serial().run(split.body, record)
    with pytest.raises(OSError, match="broken"):
        crew.finish(split, record)
    crew.end(split, record)
    assert record.failed == 1 and "begin 2" not in case.log
    assert sorted(record.finished) == [0, 3, 4]
    case.fails = -1
    crew.begin(split)
    Serial().run(split.body, record := Record())
    crew.finish(split, record)
    crew.end(split, record)
    assert sorted(record.finished) == [0, 1, 2, 3, 4]
    crew.close()


def test_a_body_that_fails_begins_no_more_of_its_tail() -> None:
    case, crew, record = Case(fails=0), TailCrew(host_workers=1), Record()
    split = crew.split(case.work, (1, 2, 3))
    crew.begin(split)
    with pytest.raises(OSError, match="broken"):
        Serial().run(split.body, record)
    crew.end(split, record)
    crew.wait()
    assert case.log == ["begin 0"] and record.failed == 0 and record.finished == []
    crew.close()
