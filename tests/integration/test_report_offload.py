"""The report of a run that offloads: stalls, memory, predictions, from rows by hand."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from perfect.compare import main
from perfect.errors import RunError
from perfect.report.offloading import prediction
from perfect.report.report import summary, write_report
from perfect.report.results import read_run
from perfect.report.time_bars import TimeShares
from perfect.report.words import DASH, TIMES, brief, size

PLAN: dict[str, Any] = {
    "inputs": "(8, 3) (8,)", "part": "whole step", "runs": 90, "seconds": 10.0,
    "compute_seconds": 6.0, "transfer_seconds": 1.0, "median_seconds": 0.11,
    "predicted_seconds": 0.1, "bound_seconds": 0.09, "binds": "compute", "copies": 4,
    "bytes_in": 3 * 2**20, "bytes_out": 2**20, "peak_bytes": 10 * 2**20, "held_bytes": 9 * 2**20,
    "picture": "memory-1.svg",
}  # fmt: skip
PHASES: list[dict[str, Any]] = [
    {"name": "pretrain", "runs": 60, "seconds": 40.0, "compute_seconds": 20.0,
     "transfer_seconds": 8.0, "input_seconds": 2.0, "planning_seconds": 4.0},
    {"name": "finetune", "runs": 30, "seconds": 10.0, "compute_seconds": 5.0,
     "transfer_seconds": 2.0, "input_seconds": 1.0, "planning_seconds": 0.0},
]  # fmt: skip
OFFLOAD: dict[str, Any] = {
    "budget_bytes": 11 * 2**20, "host_budget_bytes": None, "smallest_bytes": 4 * 2**20,
    "peak_bytes": 10 * 2**20, "host_bytes": 30 * 2**20, "unmoved_bytes": 20 * 2**20,
    "held_bytes": 9 * 2**20, "resident_seconds": 0.09, "bound_seconds": 0.09, "binds": "compute",
    "predicted_seconds": 0.1, "median_seconds": 0.11, "transfer_share": 0.1, "runs": 90,
    "seconds": 50.0, "compute_seconds": 25.0, "transfer_seconds": 10.0, "input_seconds": 3.0,
    "planning_seconds": 4.0, "plans_made": 1, "plans": [PLAN], "phases": PHASES,
}  # fmt: skip
RUN: dict[str, Any] = {
    "status": "completed", "name": "small", "steps": 90, "wall_seconds": 100.0, "accuracy": 0.9,
    "accuracy_on": "test", "best_accuracy": 0.9, "stall_seconds": 3.0, "decoded_samples": 100,
    "served_samples": 300, "train_samples": 100,
}  # fmt: skip


class Page(HTMLParser):
    """Its text, row by row of its tables, and its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == first)


def make_run(folder: Path, offload: Any = OFFLOAD, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    record = RUN | ({} if offload is None else {"offload": offload}) | changes
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def page(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def draw(path: Path) -> None:
    figure = Figure()
    axes = figure.add_subplot()
    axes.fill_between([0, 1], [0, 1], hatch="////")
    axes.plot([0, 1], [0, 1], "o")
    figure.savefig(path)


# ---- what is shown ------------------------------------------------------------------------------


def test_both_stalls_stand_side_by_side_for_every_phase_and_the_whole_run(tmp_path: Path) -> None:
    found = Page(page(make_run(tmp_path)))
    head = next(row for row in found.rows if "Waiting for transfers" in row)
    assert head[2:5] == ["Kernels", "Waiting for transfers", "Waiting for input"]
    # Of 50, 40 and 10 s; what is in no part is the rest.
    assert found.row("whole run")[1:] == ["50.0 s", "50.0 %", "20.0 %", "6.0 %", "8.0 %", "16.0 %"]
    assert found.row("pretrain")[1:] == ["40.0 s", "50.0 %", "20.0 %", "5.0 %", "10.0 %", "15.0 %"]
    assert found.row("finetune")[1:] == ["10.0 s", "50.0 %", "20.0 %", "10.0 %", "0.0 %", "20.0 %"]


def test_one_phase_is_the_whole_run(tmp_path: Path) -> None:
    text = page(make_run(tmp_path, OFFLOAD | {"phases": PHASES[:1]}))
    assert "pretrain" in text and "whole run" not in text


def test_the_bars_are_as_wide_as_the_shares_say(tmp_path: Path) -> None:
    text = page(make_run(tmp_path, OFFLOAD | {"phases": PHASES[:1]}))
    svg = text[text.index("Where the time of training went") :]
    svg = svg[: svg.index("</svg>")]
    # Each bar is a path with the corners M x y L x y L x y L x y z.
    boxes = [
        [float(x) for x in re.findall(r"[ML] ([\d.]+) [\d.]+", path)]
        for path in re.findall(r'<path d="(M [^"]*z)', svg)
    ]
    widths = [max(xs) - min(xs) for xs in boxes]
    full = 9.4 * 72
    bars = [round(wide / full, 3) for wide in widths]
    assert bars[1:6] == [0.5, 0.2, 0.05, 0.1, 0.15]  # behind the first, the background


def test_a_clock_that_counts_less_than_its_parts_leaves_no_rest() -> None:
    time = TimeShares.from_row(
        {"name": "p", "seconds": 5.0, "compute_seconds": 4.0, "transfer_seconds": 2.0}
    )
    assert (time.seconds, time.parts["rest"]) == (6.0, 0.0)
    assert time.share("compute_seconds") == pytest.approx(2 / 3)


def test_memory_is_told_against_what_a_step_needs(tmp_path: Path) -> None:
    found = Page(page(make_run(tmp_path)))
    assert found.row("Budget") == ["Budget", "11.0 MiB", "55.0 %"]
    assert found.row("Taken by the plan")[1:] == ["10.0 MiB", "50.0 %"]
    assert found.row("In use at the same time, measured")[1:] == ["9.0 MiB", "45.0 %"]
    assert found.row("The smallest budget that can be planned")[1:] == ["4.0 MiB", "20.0 %"]


def test_the_pictures_that_the_run_drew_are_images_in_which_nothing_runs(tmp_path: Path) -> None:
    nasty = "'\"><script>"
    plans = [PLAN, PLAN | {"inputs": nasty, "part": nasty, "picture": "memory-2.svg"}]
    make_run(tmp_path, OFFLOAD | {"plans": plans})
    without = page(tmp_path)
    draw(tmp_path / "memory-1.svg")
    stranger = b"<svg onload='alert(1)'><script>alert(2)</script></svg>"
    (tmp_path / "memory-2.svg").write_bytes(stranger)
    text = page(tmp_path)
    assert "alert(" not in text and "://" not in text and "<script" not in text
    assert text.count("<svg") == without.count("<svg")
    attributes = Page(text).attributes
    of_steps = [value for name, value in attributes if name == "alt"]
    assert of_steps == ["Memory: whole step, batch of (8, 3) (8,)",
                        f"Memory: {nasty}, batch of {nasty}"]  # fmt: skip
    shown = [value.partition("svg+xml;base64,")[2] for name, value in attributes if name == "src"]
    assert base64.b64decode(shown[0]) == (tmp_path / "memory-1.svg").read_bytes()
    assert base64.b64decode(shown[1]) == stranger


def test_a_picture_is_read_from_the_run_folder_alone(tmp_path: Path) -> None:
    draw(tmp_path / "outside.svg")
    text = page(
        make_run(tmp_path / "run", OFFLOAD | {"plans": [PLAN | {"picture": "../outside.svg"}]})
    )
    assert "Memory: whole step" not in text


def test_a_damaged_picture_is_said_and_the_page_is_made(tmp_path: Path) -> None:
    (tmp_path / "memory-1.svg").write_text("", encoding="utf-8")
    assert "memory-1.svg is damaged and cannot be shown." in page(make_run(tmp_path))


def test_a_plan_is_a_row_with_its_prediction_and_the_measured_median(tmp_path: Path) -> None:
    found = Page(page(make_run(tmp_path)))
    assert found.row("(8, 3) (8,)") == [
        "(8, 3) (8,)", "whole step", "90", "100 ms", "110 ms", f"1.10{TIMES}", "10.0 %", "3.0 MiB",
        "1.0 MiB", "compute",
    ]  # fmt: skip


def test_plans_that_are_no_longer_kept_are_counted(tmp_path: Path) -> None:
    assert "no longer kept" not in page(make_run(tmp_path))
    assert "17 plans were made" in page(make_run(tmp_path, OFFLOAD | {"plans_made": 17}))


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (0.1, f"A step was predicted to take 100 ms and took 100 ms: 1.00{TIMES}."),
        (0.11, f"A step was predicted to take 100 ms and took 110 ms: 1.10{TIMES}."),
        (0.112, "That is 12 % more:"),
        (0.05, "That is 50 % less:"),
    ],
)
def test_a_prediction_that_is_more_than_a_tenth_off_is_said_to_be(
    measured: float, said: str
) -> None:
    text = prediction({"predicted_seconds": 0.1, "median_seconds": measured})
    assert said in text
    assert ("That is" in text) == ("That is" in said)


def test_the_lead_and_the_key_figures_name_both_stalls(tmp_path: Path) -> None:
    text = Page(page(make_run(tmp_path))).words
    assert text[text.index("Input stall") + 1] == "3.0 %"
    assert text[text.index("Transfer stall") + 1] == "10.0 %"
    said = summary(read_run(tmp_path))
    assert "3 s of 100 s waiting for decoding and 10 s waiting for transfers." in said


# ---- runs without it ----------------------------------------------------------------------------


def test_a_run_without_offload_has_none_of_it(tmp_path: Path) -> None:
    text = page(make_run(tmp_path, None))
    assert "ransfer" not in text and "Memory over" not in text and "predicted" not in text
    assert "Stall share" in text


def test_a_run_that_ended_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    begun = {"plans_made": 0, "plans": [], "phases": [], "transfer_seconds": 0.0}
    text = page(make_run(tmp_path, begun, status="failed"))
    assert "No step was trained." in text and "Memory over" not in text


def test_a_run_that_trained_eagerly_is_not_said_to_have_had_no_kernels(tmp_path: Path) -> None:
    eager = {"runs": 0, "plans_made": 0, "plans": [], "phases": [{"name": "all", "seconds": 9.0}]}
    text = page(make_run(tmp_path, eager))
    assert "No step was planned: the run trained eagerly." in text
    assert "Waiting for transfers" not in text


def test_what_is_not_known_is_a_dash(tmp_path: Path) -> None:
    bare = {"inputs": "(8,)", "part": "whole step", "runs": 0, "median_seconds": None}
    phases = [{"name": "pretrain", "seconds": 3.0, "compute_seconds": None}]
    found = Page(page(make_run(tmp_path, {"runs": 1, "plans": [bare], "phases": phases})))
    assert found.row("pretrain") == [
        "pretrain",
        "3.0 s",
        "0.0 %",
        "0.0 %",
        "0.0 %",
        "0.0 %",
        "100.0 %",
    ]
    assert found.row("(8,)")[3:] == [DASH] * 7


def test_a_damaged_section_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, OFFLOAD | {"plans": [{"part": "whole step"}], "phases": [3]})
    with pytest.raises(RunError, match=r"offload\.plans\[0\] lacks inputs and runs"):
        write_report(tmp_path)
    with pytest.raises(RunError, match=r"offload\.phases\[0\] lacks name and seconds"):
        write_report(tmp_path)


def test_a_section_that_is_no_mapping_is_damaged(tmp_path: Path) -> None:
    make_run(tmp_path, [1])
    with pytest.raises(RunError, match=r"offload is '\[1\]', not a mapping"):
        write_report(tmp_path)


# ---- runs side by side --------------------------------------------------------------------------


def table(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    assert main([*map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:16].strip(): re.split(r"\s{2,}", line[16:].strip()) for line in lines}


def test_a_comparison_has_rows_of_memory_and_transfers_where_a_run_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, moved = make_run(tmp_path / "a", None), make_run(tmp_path / "b")
    told = table([plain, moved], capsys)
    assert told["Transfer stall"] == [DASH, "10.0 %"]
    assert told["Step memory"] == [DASH, "10.0 MiB"]
    assert told["Memory budget"] == [DASH, "11.0 MiB"]


def test_a_comparison_of_runs_without_offload_has_no_such_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = table([make_run(tmp_path / name, None) for name in "ab"], capsys)
    assert "Stall share" in told
    assert not {"Transfer stall", "Step memory", "Memory budget"} & {*told}


# ---- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, DASH), (0.0, "0 \N{MICRO SIGN}s"), (3.2e-5, "32 \N{MICRO SIGN}s"),
     (0.0123, "12.3 ms"), (0.1, "100 ms"), (0.9996, "1.00 s"), (2.5, "2.50 s"), (99.99, "100 s"),
     (150, "2.5 min")],
)  # fmt: skip
def test_a_step_takes_so_many_of_the_unit_that_fits(seconds: float | None, said: str) -> None:
    assert brief(seconds) == said


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (None, DASH),
        (0, "0.0 MiB"),
        (1023, "0.00098 MiB"),
        (2**20, "1.0 MiB"),
        (3 << 30, "3,072.0 MiB"),
    ],
)
def test_bytes_are_told_in_one_unit(nbytes: float | None, said: str) -> None:
    assert size(nbytes) == said
