"""What run.json, the report, the terminal and loggers tell of a swarm and its members."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from perfect.config.elastic_schema import shared_keys
from perfect.config.schema import RunConfig, dump_config
from perfect.report.report import write_report
from perfect.runs.progress import Bar
from perfect.runs.swarm_figures import PLANNED, board_of, figures_by_name, swarm_record, words_of
from trainers.elastic.deciding.header import Header, LaneLogs, MemberPace
from trainers.elastic.deciding.view import Member, View

LINES: list[dict[str, Any]] = [
    {"run": {"lanes": 4, "sum": "fast", "micro": 2}, "time": 100.0},
    {"begins": 0, "with": "nothing", "time": 100.0},
    {"generation": 1, "members": ["a"], "step": 0, "time": 101.0},
    {"commit": 0, "added": [["a", [0, 1, 2, 3]]], "peers": [["a", 8, 0.5, 0]], "digest": "0",
     "time": 102.0},
    {"generation": 2, "members": ["a", "b"], "step": 1, "time": 103.0},
    {"commit": 1, "added": [["a", [0, 2]], ["b", [1, 3]]], "digest": "1", "time": 104.0,
     "peers": [["a", 4, 0.75, 2048], ["b", 4, 0.2, 0]]},
    {"generation": 3, "members": ["a"], "step": 2, "time": 105.0},
    {"gap": 0.25, "why": "b is <gone>", "step": 2, "time": 105.0},
    {"commit": 2, "added": [["a", [0, 1, 2, 3]]], "peers": [["a", 8, 0.75, 3072]], "digest": "2",
     "time": 106.0},
]  # fmt: skip


def test_generations_gaps_and_peers_are_counted_from_the_log() -> None:
    told = swarm_record(LINES)
    assert told["lanes"] == 4 and told["began"] == {"step": 0, "with": "nothing"}
    assert [(g["generation"], g["steps"], g["ended"]) for g in told["generations"]] == [
        (1, 1, PLANNED), (2, 1, "b is <gone>"), (3, 1, None),
    ]  # fmt: skip
    assert [g["seconds"] for g in told["generations"]] == [1.0, 3.0, 5.0]
    assert told["gaps"] == [{"step": 2, "seconds": 0.25, "why": "b is <gone>"}]
    assert told["peers"] == [
        {"name": "a", "lanes": 10, "steps": 3, "samples": 20, "seconds": 2.0, "present": 5.0,
         "bytes_sent": 3072},
        {"name": "b", "lanes": 2, "steps": 1, "samples": 4, "seconds": 0.2, "present": 2.0,
         "bytes_sent": 0},
    ]  # fmt: skip


def commit(step: int, time: float, *peers: list[Any]) -> dict[str, Any]:
    return {"commit": step, "added": [], "peers": [*peers], "digest": "", "time": time}


def test_a_peer_that_joins_again_and_a_log_that_goes_on_count_no_byte_twice() -> None:
    again = [
        commit(3, 107.0, ["a", 8, 0.5, 3172], ["b", 8, 0.5, 100]),
        commit(4, 108.0, ["a", 8, 0.5, 3272], ["b", 8, 0.5, 40]),  # b began anew
        {"begins": 5, "with": "member", "time": 900.0},
        {"generation": 9, "members": ["a", "b"], "step": 9, "time": 901.0},
        commit(9, 902.0, ["a", 8, 0.5, 0], ["b", 8, 0.5, 9040]),
        commit(10, 903.0, ["a", 8, 0.5, 100], ["b", 8, 0.5, 9140]),
    ]
    a, b = swarm_record([*LINES, *again])["peers"]
    assert a["bytes_sent"] == 3272 + 100
    assert b["bytes_sent"] == 100 + 40 + 100
    assert (a["present"], b["present"]) == (9.0, 6.0)


def test_a_log_that_tells_no_figures_gives_none(tmp_path: Path) -> None:
    lines = [{key: value for key, value in line.items() if key != "peers"} for line in LINES]
    run = {"status": "completed", "name": "a", "steps": 3, "elastic": swarm_record(lines)}
    (tmp_path / "run.json").write_text(json.dumps(run))
    page = write_report(tmp_path).read_text()
    assert cells_of(page, "a") == ["10", "83.3 %", "3", "\u2013", "\u2013", "0.0 MiB"]


def cells_of(page: str, first: str) -> list[str]:
    """The other cells of a row of a table."""
    row = next(row for row in page.split("<tr>") if f">{first}</td>" in row)
    return re.findall(r"<td[^>]*>([^<]*)</td>", row)[1:]


def test_the_report_shows_who_computed_how_much_and_why_generations_ended(tmp_path: Path) -> None:
    run = {"status": "completed", "name": "a", "steps": 3, "elastic": swarm_record(LINES)}
    (tmp_path / "run.json").write_text(json.dumps(run))
    page = write_report(tmp_path).read_text()
    assert "The swarm" in page and "b is &lt;gone&gt;" in page and "b is <gone>" not in page
    assert "width:83.33%" in page and "width:16.67%" in page
    assert "1 generation ended unplanned" in page
    assert cells_of(page, "a") == ["10", "83.3 %", "3", "10", "40.0 %", "0.0029 MiB"]
    assert cells_of(page, "b") == ["2", "16.7 %", "1", "20", "10.0 %", "0.0 MiB"]


def test_the_report_tells_gaps_by_phase(tmp_path: Path) -> None:
    phases = [
        {"name": name, "reuse": 1, "first_step": first, "last_step": last}
        for name, first, last in (("one", 0, 1), ("two", 2, 2), ("three", 3, 9))
    ]
    run = {
        "status": "completed", "name": "a", "steps": 10, "elastic": swarm_record(LINES),
        "phases": phases,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    page = write_report(tmp_path).read_text()
    page = page[page.index("The swarm") :]
    assert cells_of(page, "two") == ["1", "250 ms", "250 ms", "250 ms"]
    assert cells_of(page, "one")[0] == cells_of(page, "three")[0] == "0"


def test_peers_must_agree_on_all_keys_but_those_of_a_node() -> None:
    plain = {
        "model": {"name": "resnet18"},
        "data": {"name": "cifar10", "root": "here"},
        "phases": [{"name": "train", "passes": 2}],
        "elastic": {"secret_file": "one", "lanes": 32},
    }
    other = plain | {
        "data": {"name": "cifar10", "root": "there"},
        "trainer": {"threads": 3},
        "elastic": {"secret_file": "two", "lanes": 32, "host": "10.0.0.2"},
    }
    one, two = (shared_keys(dump_config(RunConfig.model_validate(c))) for c in (plain, other))
    assert one == two and one["config.elastic.lanes"] == "32"
    assert one["config.phases.0.passes"] == "2"
    changed = shared_keys(
        dump_config(RunConfig.model_validate(plain | {"optimizer": {"name": "sgd", "lr": 0.3}}))
    )
    assert [key for key in one if one[key] != changed[key]] == ["config.optimizer.lr"]


VIEW = View(3, (Member("a", "h", 1), Member("b", "h", 2), Member("c", "h", 3)))
HEADERS = [
    Header("a", 5, done=(0, 1, 2), pace=MemberPace(0.0, 0, 0.5, 3 << 20), logs=LaneLogs(48)),
    Header("b", 5, done=(3,), pace=MemberPace(0.0, 0, 0.25, 1 << 20), logs=LaneLogs(16)),
]
"""Of c nothing was heard yet."""


def test_the_line_tells_lanes_samples_a_second_and_bytes_of_each_member() -> None:
    assert words_of(VIEW, HEADERS) == (
        "generation 3: a 3 lanes 96 samples/s 3.0 MiB sent; b 1 lanes 64 samples/s 1.0 MiB sent;"
        " c 0 lanes 0 samples/s 0.0 MiB sent"
    )


def test_the_table_has_a_row_for_each_member_with_its_state() -> None:
    said = StringIO()
    Console(file=said, width=100).print(board_of(VIEW, HEADERS, 1))
    rows = [line.split() for line in said.getvalue().splitlines() if line.strip()]
    assert rows[0] == ["generation", "3", "lanes", "samples/s", "sent", "state"]
    assert rows[-3:] == [
        ["a", "3", "96", "3.0", "MiB", "writes"],
        ["b", "1", "64", "1.0", "MiB", "this", "peer"],
        ["c", "0", "0", "0.0", "MiB", "computes", "nothing"],
    ]


def test_the_table_stands_below_the_bar_of_progress() -> None:
    said = StringIO()
    bar = Bar(console=Console(file=said, width=100))
    bar.below = board_of(VIEW, HEADERS, 1)
    bar.add_task("", total=10)
    bar.console.print(bar.get_renderable())
    assert "generation 3" in said.getvalue() and "writes" in said.getvalue()


def test_loggers_are_given_the_figures_by_member() -> None:
    told = figures_by_name(HEADERS)
    assert told["elastic/a/samples_per_second"] == 96.0
    assert told["elastic/b/sent_bytes"] == float(1 << 20)
    assert told["elastic/b/lanes"] == 1.0
