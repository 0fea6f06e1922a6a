"""The report of a run: its figures against arithmetic done here, and what it does without them."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from perfect.report.metrics import Metrics, read_metrics
from perfect.report.plots import rate_curve
from perfect.report.report import summary, write_report
from perfect.report.results import read_run
from perfect.report.run_phases import PhaseSpan, RunPhases

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


class Page(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


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


def test_a_run_without_reuse_claims_no_saving(tmp_path: Path) -> None:
    said = sentence(tmp_path, decoded_samples=24_000, fresh_passes=24.0)
    assert "24 fresh passes decoded for 24 served: no decodes saved" in said


def test_a_run_whose_samples_are_in_memory_claims_no_decodes(tmp_path: Path) -> None:
    said = sentence(tmp_path, in_memory=True)
    assert "14.4 fresh passes for 24 served; the data set is in memory, so nothing is" in said
    assert "waiting for samples" in said
    text = Page(report(make_run(tmp_path / "page", in_memory=True))).text
    assert "Serves reused" in text and "Decodes saved" not in text


def test_the_curve_of_the_learning_rate_begins_at_step_0() -> None:
    metrics = Metrics({"step": np.array([9.0, 19.0]), "lr": np.array([0.1, 0.05])})
    phases = [
        {"first_step": 0, "last_step": 14, "lr_start": 0.02, "lr_end": 0.1},
        {"first_step": 15, "last_step": 24, "lr_start": 0.09, "lr_end": 0.0},
    ]
    steps, rates = rate_curve(metrics, phases)
    assert list(steps) == [0, 9, 14, 15, 19, 24]
    assert list(rates) == [0.02, 0.1, 0.1, 0.09, 0.05, 0.0]


def test_the_key_figures_and_the_table_of_decodes_agree_with_run_json(tmp_path: Path) -> None:
    text = Page(report(make_run(tmp_path))).text
    assert "91.23 %" in text and "92.00 %" in text and "4.4 %" in text
    assert "Decoded for a first serve 14,400 14.4 60.0 %" in text
    assert "Saved 9600 9.6 40.0 %" in text
    assert "The reuse buffer took 3.0 MiB" in text


def test_phases_are_listed_with_steps_rates_and_reasons(tmp_path: Path) -> None:
    text = Page(report(make_run(tmp_path))).text
    assert "pretrain 3 5 0\N{EN DASH}749 5000 0 → 0.2 plateau: flat" in text


def test_sections_come_in_the_order_in_which_a_reader_asks(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, trace=[check(3, 0.5), check(4, 0.05, fired=True)]))
    titles = ["Accuracy and loss", "Learning rate", "Decode, serve, stall", "Plateau", "Phases",
              "Decodes saved", "Environment", "Configuration"]  # fmt: skip
    places = [page.index(f"<h2>{title}</h2>") for title in titles]
    assert places == sorted(places)


def test_accuracy_on_the_hold_out_is_not_called_test_accuracy(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, accuracy_on="holdout"))
    assert "91.23 % hold-out accuracy" in summary(read_run(tmp_path))
    assert "test, final weights" not in page
    assert "test, final weights" in report(make_run(tmp_path, accuracy_on="test"))


def test_the_configuration_is_the_file_or_else_what_run_json_says(tmp_path: Path) -> None:
    assert "accuracy_slope: 0.1" in report(make_run(tmp_path))
    (tmp_path / "config.yaml").write_text("# mine\nseed: 3\n", encoding="utf-8")
    assert "<pre># mine\nseed: 3</pre>" in report(tmp_path)


# ---- figures ------------------------------------------------------------------------------------


def test_a_switch_is_marked_with_its_reason_and_the_end_of_the_run_is_not(tmp_path: Path) -> None:
    page = report(make_run(tmp_path))
    assert page.count(">switch: plateau</text>") == 1
    assert ">switch: planned</text>" not in page
    told = "The run switched to finetune at step 750 (epoch 15.0): plateau;"
    assert f"{told} accuracy +0.031 points/epoch." in page


def test_a_phase_too_narrow_for_its_name_is_labelled_by_its_reuse(tmp_path: Path) -> None:
    phases = [RUN["phases"][0] | {"last_step": 99}, RUN["phases"][1] | {"first_step": 100}]
    page = report(make_run(tmp_path, phases=phases))
    assert ">pretrain, reuse 3</text>" not in page
    assert ">reuse 3</text>" in page and ">finetune, fresh</text>" in page


def test_phases_on_an_axis_of_seconds_begin_when_their_first_step_did(tmp_path: Path) -> None:
    metrics = read_metrics(make_run(tmp_path) / "metrics.csv")
    run_phases = RunPhases([PhaseSpan("pretrain", 3, 100, 450)]).over_seconds(metrics)
    assert (run_phases.spans[0].start, run_phases.spans[0].end) == (10, 25)


def test_the_plateau_rule_is_drawn_with_the_thresholds_of_the_configuration(tmp_path: Path) -> None:
    trace = [check(2, None), check(3, 0.5), check(4, 0.05, fired=True)]
    page = report(make_run(tmp_path, trace=trace))
    assert "flat: below 0.1<" in page and "flat: within ±0.3<" in page
    page = report(make_run(tmp_path, trace=trace, config={}))
    assert "Hold-out accuracy, points per epoch" in page and "flat:" not in page


def test_a_window_that_never_filled_is_said_in_words(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, trace=[check(2, None)]))
    said = "The window never filled, so there are no slopes. The last check said: window fills: 2"
    assert f"{said} of 12 points." in page


def test_without_a_plateau_rule_there_is_no_section_about_it(tmp_path: Path) -> None:
    looks = [check(2, None) | {"verdict": None}]
    assert "<h2>Plateau" not in report(make_run(tmp_path, trace=looks))


def test_a_page_is_the_same_when_written_again_and_changes_no_setting(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = dict(matplotlib.rcParams)
    first = report(tmp_path)
    assert dict(matplotlib.rcParams) == before
    assert report(tmp_path) == first


def test_two_figures_of_a_page_share_no_name(tmp_path: Path) -> None:
    trace = [check(3, 0.5), check(4, 0.05, fired=True)]
    names = [v for n, v in Page(report(make_run(tmp_path, trace=trace))).attributes if n == "id"]
    assert len(names) > 5 and len(names) == len(set(names))


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


def test_a_name_in_another_script_draws_no_warning(tmp_path: Path) -> None:
    phases = [phase | {"name": "預訓練"} for phase in RUN["phases"]]
    assert ">預訓練, reuse 3</text>" in report(make_run(tmp_path, phases=phases))


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


def test_a_metrics_file_with_one_row_or_only_a_head_is_enough(tmp_path: Path) -> None:
    text = Page(report(make_run(tmp_path, ROWS[:1]))).text
    assert "Rates need two rows" in text and "Loss" in text
    assert "Neither accuracy nor loss" in Page(report(make_run(tmp_path, [], accuracy=None))).text


def test_a_run_at_step_0_has_a_report(tmp_path: Path) -> None:
    row = ROWS[0] | {"step": 0, "wall_seconds": 0}
    changes = {"steps": 0, "phases": [], "switches": [], "served_samples": 0, "accuracy": None}
    assert "0 steps" in report(make_run(tmp_path, [row], **changes))


def test_without_validation_the_loss_stands_alone(tmp_path: Path) -> None:
    rows = [row for row in ROWS if "val_accuracy" not in row]
    changes = {"accuracy": None, "accuracy_on": None, "best_accuracy": None}
    page = report(make_run(tmp_path, rows, **changes))
    assert summary(read_run(tmp_path)).startswith("1200 steps without a measured accuracy; ")
    assert ">Loss</text>" in page and ">Accuracy, %</text>" not in page


def test_an_interrupted_run_tells_its_best_accuracy_and_how_to_go_on(tmp_path: Path) -> None:
    changes = {"status": "interrupted", "accuracy": None, "accuracy_on": None, "resumed_at": [7]}
    text = Page(report(make_run(tmp_path, **changes))).text
    assert "Interrupted: 92.00 % best hold-out accuracy in 1200 steps" in text
    said = "The run was interrupted after 1200 steps. The same command resumes it."
    assert f"{said} It was resumed at step 7." in text


def test_a_failed_run_shows_its_error(tmp_path: Path) -> None:
    text = Page(report(make_run(tmp_path, status="failed", error="loss is nan at step 420"))).text
    assert "The run failed after 1200 steps. loss is nan at step 420" in text


def test_a_loss_that_is_no_number_is_left_out_and_its_step_named(tmp_path: Path) -> None:
    rows = [*ROWS, {"step": 900, "train_loss": "nan"}, {"step": 901, "train_loss": "inf"}]
    assert ">not a finite number at step 900</text>" in report(make_run(tmp_path, rows))
    assert "not a finite number" not in report(make_run(tmp_path))
