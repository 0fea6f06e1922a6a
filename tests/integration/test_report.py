"""The report of a run: its figures against arithmetic done here, and what it does without them."""

import csv
import json
from pathlib import Path
from typing import Any

import matplotlib
from support.pages import Page

from perfect.report.report import summary, write_report
from perfect.report.results import read_run

RUN: dict[str, Any] = {
    "status": "completed", "name": "small", "seed": 3, "accuracy": 0.9123, "accuracy_on": "test",
    "best_accuracy": 0.92, "steps": 1200, "wall_seconds": 70.0,
    "stall_seconds": 3.1, "serve_seconds": 1.5, "decoded_samples": 14_400, "extra_decodes": 0,
    "served_samples": 24_000, "buffer_bytes": 3 * 2**20, "fresh_passes": 14.4,
    "train_samples": 1000,
    "phases": [
        {"name": "pretrain", "reuse": 3, "passes": 5, "first_step": 0, "last_step": 749,
         "decoded": 5000, "lr_start": 0.0, "lr_end": 0.2, "reason": "plateau: flat"},
        {"name": "finetune", "reuse": 1, "passes": 9, "first_step": 750, "last_step": 1199,
         "decoded": 9400, "lr_start": 0.2, "lr_end": 0.0, "reason": "planned: 9 passes done"},
    ],
    "switches": [
        {"at": 15.0, "step": 750, "left": "pretrain", "entered": "finetune", "reason": "plateau",
         "detail": "accuracy +0.031 points/epoch"},
        {"at": 24.0, "step": 1200, "left": "finetune", "entered": None, "reason": "planned",
         "detail": "9 passes done"},
    ],
    "trace": [], "environment": {"python": "3.12.1", "device": "cpu", "cores": 2},
    "config": {"seed": 3, "switch": {"rule": "plateau", "accuracy_slope": 0.1, "loss_slope": 0.003,
                                     "hits": 2}},
    "error": None, "resumed_at": [],
}  # fmt: skip
ROWS: list[dict[str, float]] = [
    {"step": 100, "wall_seconds": 10, "lr": 0.2, "decoded": 1000, "served": 3000,
     "stall_seconds": 1, "train_loss": 2.0},
    {"step": 100, "wall_seconds": 10, "val_accuracy": 0.5, "val_loss": 1.9},
    {"step": 800, "wall_seconds": 40, "lr": 0.1, "decoded": 7000, "served": 18_000,
     "stall_seconds": 4, "train_loss": 1.0},
    {"step": 1200, "wall_seconds": 60, "val_accuracy": 0.92, "val_loss": 0.4},
]  # fmt: skip


def make_run(folder: Path, rows: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(RUN | changes), encoding="utf-8")
    rows = ROWS if rows is None else rows
    names = list(dict.fromkeys(["step", "wall_seconds", *(name for row in rows for name in row)]))
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return folder


def report(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def sentence(folder: Path, **changes: Any) -> str:
    return summary(read_run(make_run(folder, **changes)))


def check(at: float, accuracy: float | None, fired: bool = False) -> dict[str, Any]:
    loss = None if accuracy is None else -accuracy / 100
    verdict = {"at": at, "fired": fired, "accuracy_slope": accuracy, "loss_slope": loss,
               "hits": int(fired), "reason": "window fills: 2 of 12 points"}  # fmt: skip
    seen = {"at": at, "accuracy": 0.5, "loss": 1.0}
    return {"phase": "pretrain", "constant_lr": True, "seen": seen, "verdict": verdict}


# ---- words and figures --------------------------------------------------------------------------


def test_the_summary_says_accuracy_decodes_saved_and_waiting(tmp_path: Path) -> None:
    assert sentence(tmp_path) == (
        "91.23 % test accuracy after 1200 steps; 14.4 fresh passes decoded for 24 served: 40.0 %"
        " fewer decodes; 3.1 s of 70 s waiting for decoding."
    )


def test_decodes_made_again_after_a_resume_are_told(tmp_path: Path) -> None:
    said = sentence(tmp_path, extra_decodes=2400)
    assert "(and 2400 samples decoded again) for 24 served: 30.0 % fewer decodes" in said


def test_a_run_whose_samples_are_in_memory_claims_no_decodes(tmp_path: Path) -> None:
    said = sentence(tmp_path, in_memory=True)
    assert "14.4 fresh passes for 24 served; the data set is in memory, so nothing is" in said
    assert "waiting for samples" in said
    text = Page(report(make_run(tmp_path / "page", in_memory=True))).text
    assert "Serves reused" in text and "Decodes saved" not in text


def test_the_key_figures_and_the_table_of_decodes_agree_with_run_json(tmp_path: Path) -> None:
    text = Page(report(make_run(tmp_path))).text
    assert "91.23 %" in text and "92.00 %" in text and "4.4 %" in text
    assert "Decoded for a first serve 14,400 14.4 60.0 %" in text
    assert "Saved 9600 9.6 40.0 %" in text
    assert "The reuse buffer took 3.0 MiB" in text


def test_accuracy_on_the_hold_out_is_not_called_test_accuracy(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, accuracy_on="holdout"))
    assert "91.23 % hold-out accuracy" in summary(read_run(tmp_path))
    assert "test, final weights" not in page
    assert "test, final weights" in report(make_run(tmp_path, accuracy_on="test"))


# ---- figures ------------------------------------------------------------------------------------


def test_a_page_is_the_same_when_written_again_and_changes_no_setting(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = dict(matplotlib.rcParams)
    first = report(tmp_path)
    assert dict(matplotlib.rcParams) == before
    assert report(tmp_path) == first


# ---- safety -------------------------------------------------------------------------------------

NASTY = "<script>alert(1)</script>&\"'$x_{$"


def test_what_a_user_wrote_is_text_and_never_markup(tmp_path: Path) -> None:
    phases = [phase | {"name": NASTY, "reason": NASTY} for phase in RUN["phases"]]
    switches = [s | {"reason": NASTY, "detail": NASTY, "entered": NASTY} for s in RUN["switches"]]
    make_run(
        tmp_path, name=NASTY, phases=phases, switches=switches, error=NASTY, status="failed",
        environment={NASTY: NASTY}, resumed_at=[NASTY],
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(f"key: {NASTY}\n", encoding="utf-8")
    page = Page(report(tmp_path))
    assert "script" not in page.tags
    # Name (title, heading), error, resume, two switches told (3 each), four figures' labels and
    # marks, two phases (name, reason), environment (2), configuration.
    assert page.text.count("alert(1)</script>") >= 20
    assert page.text.count(NASTY) == page.text.count("alert(1)")


def test_a_page_points_to_nothing_outside_itself(tmp_path: Path) -> None:
    trace = [check(3, 0.5), check(4, 0.05, fired=True)]
    text = report(make_run(tmp_path, trace=trace))
    page = Page(text)
    assert page.tags.count("svg") == 4
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert links and all(link.startswith("#") for link in links)
    assert "://" not in text and "@import" not in text and text.count("url(") == text.count("url(#")


# ---- missing things -----------------------------------------------------------------------------


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "running", "name": "young"}', encoding="utf-8")
    text = Page(report(tmp_path)).text
    assert "Running: 0 steps without a measured accuracy." in text
    for said in ("Neither accuracy nor loss was logged", "No learning rate was logged",
                 "Rates need two rows", "Nothing was served", "No phase began"):  # fmt: skip
        assert said in text


def test_an_interrupted_run_tells_its_best_accuracy_and_how_to_go_on(tmp_path: Path) -> None:
    changes = {"status": "interrupted", "accuracy": None, "accuracy_on": None, "resumed_at": [7]}
    text = Page(report(make_run(tmp_path, **changes))).text
    assert "Interrupted: 92.00 % best hold-out accuracy in 1200 steps" in text
    said = "The run was interrupted after 1200 steps. The same command resumes it."
    assert f"{said} It was resumed at step 7." in text


def test_a_loss_that_is_no_number_is_left_out_and_its_step_named(tmp_path: Path) -> None:
    rows = [*ROWS, {"step": 900, "train_loss": "nan"}, {"step": 901, "train_loss": "inf"}]
    assert ">not a finite number at step 900</text>" in report(make_run(tmp_path, rows))
    assert "not a finite number" not in report(make_run(tmp_path))
