"""The page over all jobs of a grid: what is read for it, and what it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from perfect.errors import RunError
from perfect.report.fleet_page import metric_figure, timeline_figure, write_fleet_page
from perfect.report.fleet_record import JobSpan, read_fleet, read_timeline

RUN = {"status": "completed", "perplexity": 90.0, "perplexity_on": "test"}
RESULTS = {
    "status": "completed", "metric": "val_loss", "mode": "min", "axes": ["lr"],
    "fleet": {"devices": "auto", "stop": {"rule": "halving", "first": 5, "eta": 2}},
}  # fmt: skip
METRICS = "step,wall_seconds,val_loss\n10,1.0,5.0\n20,2.0,4.5\n"


def job(name: str, state: str = "finished", metric: float | None = 4.5, **more: Any) -> Any:
    return {
        "name": name, "settings": {"lr": 0.001}, "state": state, "step": 20, "metric": metric,
        "seconds": 2.0, "why": "", "folder": f"jobs/{name}",
    } | more  # fmt: skip


def at(second: float, name: str, phase: str, device: int | None = 0) -> dict[str, Any]:
    return {"at": 1000.0 + second, "job": name, "phase": phase, "device": device, "step": 0}


BEGINS, ENDS = {"program": "begins"}, {"program": "ends"}


def make(folder: Path, jobs: list[Any], lines: list[dict[str, Any]], **more: Any) -> Path:
    """The folder of a grid whose jobs that have finished left metrics."""
    (folder / "grid.json").write_text(json.dumps(RESULTS | {"jobs": jobs} | more))
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for row in jobs:
        if row["state"] == "finished":
            run = folder / row["folder"]
            run.mkdir(parents=True)
            (run / "run.json").write_text(json.dumps(RUN))
            (run / "metrics.csv").write_text(METRICS)
    return folder


TWO = [
    {"at": 1000.0, **BEGINS},
    at(0, "a", "starting"),
    at(0, "b", "waiting", None),
    at(2, "a", "ready"),
    at(2, "b", "starting"),
    at(3, "b", "ready"),
    at(3, "a", "running"),
    at(7, "a", "at_rung"),
    at(7, "b", "running"),
    at(9, "b", "failed", None),
    at(9, "a", "running"),
    at(10, "a", "finished", None),
    {"at": 1010.0, **ENDS},
]


def test_the_time_between_a_kill_and_the_next_start_belongs_to_nobody(tmp_path: Path) -> None:
    killed = [
        {"at": 1000.0, **BEGINS},
        at(0, "a", "running"),
        at(4, "b", "ready"),
        {"at": 5000.0, **BEGINS},
        at(4000, "a", "ready"),
        at(4003, "a", "running"),
        {"at": 5005.0, **ENDS},
    ]
    make(tmp_path, [], killed)
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write('{"at": 50')  # cut short by another kill
    spans, restarts = read_timeline(tmp_path / "timeline.jsonl")
    assert spans["a"] == [
        JobSpan("running", 0, 0, 4),
        JobSpan("ready", 0, 4, 7),
        JobSpan("running", 0, 7, 9),
    ]
    assert restarts == (4,)


def test_lines_that_no_program_of_ours_wrote_are_left_out(tmp_path: Path) -> None:
    strange: list[Any] = [
        7, None, {}, {"at": 1001.0}, at(1, "a", "running") | {"at": "x"}, {"at": 1e999, **BEGINS},
        at(1, "a", "running") | {"device": "x"}, {"at": 1001.0, "job": ["a"], "phase": "running"},
        json.loads("[" * 900 + "]" * 900),
    ]  # fmt: skip
    make(tmp_path, [job("a"), job("b", "failed", None)], TWO[:1])
    with (tmp_path / "timeline.jsonl").open("ab") as file:
        file.write(b"\xff\n" + b"[" * 99_999 + b"\n" + b"9" * 5000 + b"\n")
        file.write("".join(json.dumps(line) + "\n" for line in [*strange, *TWO[1:]]).encode())
    spans, restarts = read_timeline(tmp_path / "timeline.jsonl")
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in TWO))
    assert (spans, restarts) == read_timeline(tmp_path / "timeline.jsonl")


NASTY = "</svg><script>'\"$_{\\x1b[2J" + "x" * 250


@pytest.mark.parametrize("folder", ["<script>", "\udcff\udcfe", "x" * 250])
def test_what_a_user_wrote_is_text_and_never_markup(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    jobs = [
        job("a", settings={NASTY: NASTY}),
        job(NASTY, "failed", why=NASTY, folder=f"../{NASTY}", settings={NASTY: [NASTY]}),
    ]
    lines = [*TWO, at(1, NASTY, "running"), at(9, NASTY, "failed")]
    more = {"axes": [NASTY], "metric": NASTY, "fleet": RESULTS["fleet"] | {"metric": NASTY}}
    page = write_fleet_page(make(tmp_path / folder, jobs, lines, **more)).read_text("utf-8")
    assert "<script" not in page and page.count("&lt;script&gt;") > 8


def test_the_page_says_who_is_best_who_waited_and_what_failed(tmp_path: Path) -> None:
    failed = job("b", "failed", None, why="ValueError: <b>no</b> such key", step=3)
    make(tmp_path, [job("a"), failed], TWO)
    page = write_fleet_page(tmp_path).read_text()
    text = re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    assert "&quot;a&quot; is best: val_loss 4.5 (test perplexity 90)." in text
    assert "2 jobs (1 finished, 1 failed) in 10 s on 1 device." in text
    assert "b failed after 3 steps: ValueError: &lt;b&gt;no&lt;/b&gt; such key" in text
    assert "<a href='jobs/a/report.html'>a</a>" in text
    waits = text[text.index("Who waited for what") :]
    head = re.findall(r"<th[^>]*>(.*?)</th>", waits)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", waits)]
    told = {
        re.sub("<.*?>", "", row[0]): dict(zip(head[1:], row[1:], strict=True))
        for row in rows
        if len(row) == len(head)
    }
    dash = "\N{EN DASH}"
    assert told["a"] == {
        "Trains": "5.0 s", "Is built and planned": "2.0 s", "Waits for its turn": "1.0 s",
        "Waits at a rung": "2.0 s", "Waits to be started": dash,
    }  # fmt: skip
    assert told["All jobs"]["Trains"] == "7.0 s"
    assert "Jobs had the devices for 100.0 % of the time." in text


def test_the_page_needs_no_script_and_no_other_file(tmp_path: Path) -> None:
    page = write_fleet_page(make(tmp_path, [job("a")], TWO)).read_text()
    assert page.count("<svg role") == 2
    assert "<script" not in page and "<link" not in page and "src=" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_jobs_that_have_not_begun_have_no_figures_and_a_page(tmp_path: Path) -> None:
    waiting = [job(f"j{n}", "waiting", None, step=0) for n in range(2)]
    fleet = read_fleet(make(tmp_path, waiting, [], status="interrupted"))
    assert metric_figure(fleet) is None
    assert timeline_figure(fleet) is None
    page = write_fleet_page(tmp_path).read_text()
    assert "No job has begun." in page
    assert "The same command goes on with it." in page
    assert "2 jobs (2 not at their end)" in page


def test_a_stopped_job_is_not_best_however_good_it_was(tmp_path: Path) -> None:
    fleet = read_fleet(make(tmp_path, [job("a", "stopped", 1.0)], TWO))
    assert fleet.best is None
    assert "No job has finished with a val_loss" in write_fleet_page(tmp_path).read_text()


def grid_of(**changes: Any) -> str:
    return json.dumps(RESULTS | {"jobs": [job("a") | changes.pop("job", {})]} | changes)


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "{", "[]", '{"jobs": [{}]}', "[" * 99_999, '"\\ud800"'),
        *(grid_of(job={"metric": value}) for value in ("x", [], 10**400)),
        *(grid_of(job={"step": 0.5}), grid_of(axes=[["lr"]]), grid_of(mode=None)),
        grid_of(fleet={"stop": {"rule": "halving", "first": 0, "eta": 1}}),
    ],
    ids=lambda wrong: wrong[:9],
)
def test_a_folder_without_a_grid_is_an_error_that_says_what_to_do(
    wrong: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"cannot be read .* give the folder of a grid"):
        read_fleet(tmp_path / "nowhere")
    (tmp_path / "grid.json").write_text(wrong)
    with pytest.raises(RunError, match=r"grid\.json is damaged .*; run the same command again"):
        read_fleet(tmp_path)
