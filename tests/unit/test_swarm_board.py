"""What people are told of the members of a swarm while it trains."""

from io import StringIO

from rich.console import Console

from perfect.runs.progress import Bar
from perfect.runs.swarm_figures import board_of, figures_by_name, words_of
from trainers.elastic.deciding.header import Header, LaneLogs, MemberPace
from trainers.elastic.deciding.view import Member, View

VIEW = View(3, (Member("a", "h", 1), Member("b", "h", 2), Member("c", "h", 3)))
HEADERS = [
    Header("a", 5, done=(0, 1, 2), pace=MemberPace(0.0, 0, 0.5, 3 << 20), logs=LaneLogs(48)),
    Header("b", 5, done=(3,), pace=MemberPace(0.0, 0, 0.25, 1 << 20), logs=LaneLogs(16)),
]
"""Of c nothing was heard yet."""


def test_headers_carry_samples_a_second_and_bytes_of_each_member() -> None:
    told = [Header.decode(header.encode()) for header in HEADERS]
    assert [one.samples_per_second for one in told] == [96.0, 64.0]
    assert [one.pace.sent for one in told] == [3 << 20, 1 << 20]


def test_a_member_without_a_lane_has_no_samples_a_second() -> None:
    assert Header("a", 5).samples_per_second == 0.0


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
