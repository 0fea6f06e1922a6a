"""What a grid's program keeps beside the fleet's journal, and where its jobs' words go."""

import io
import json
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from perfect.config.grid import Grid
from perfect.config.grid_reader import read_recipe
from perfect.errors import FolderError
from perfect.grids.grid_fleet import OUTPUT, GridJob, job_output
from perfect.grids.grid_run import GridFolder, Timeline
from perfect.runs.folder import RunFolder
from trainers.fleet.deciding.events import FleetError, Restarted
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState, JobState, Phase
from trainers.fleet.keeping.fleet_result import FleetResult, JobResult

GRID = {
    "model": {"name": "gpt2_tiny"},
    "data": {"name": "wikitext2", "sequence": 64},
    "optimizer": {"name": "adamw"},
    "phases": [{"name": "train", "steps": 30}],
    "grid": {"optimizer.lr": [1e-3, 1e-4]},
    "fleet": {"quantum": 5},
}


def grid(folder: Path, **changes: Any) -> Grid:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(GRID | changes))
    read, _ = read_recipe(path)
    assert isinstance(read, Grid)
    return read


# ---- the folder ---------------------------------------------------------------------------------


def test_a_folder_belongs_to_its_grid_and_how_it_is_run_may_change(tmp_path: Path) -> None:
    folder = GridFolder(tmp_path / "out")
    folder.open(grid(tmp_path))
    folder.open(grid(tmp_path))
    folder.open(grid(tmp_path, fleet={"quantum": 9, "budget": "1GiB", "devices": 2}))
    folder.open(grid(tmp_path, offload={"budget": "50%"}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grid": {"optimizer.lr": [1e-3, 1e-5]}}, "grid.optimizer.lr.1 is 0.0001 there, 1e-05"),
        ({"grid": {"seed": [1, 2]}}, "grid.optimizer.lr is"),
        ({"fleet": {"metric": "val_perplexity"}}, "fleet.metric is 'val_loss' there"),
        ({"data": {"name": "wikitext2", "sequence": 32}}, "data.sequence is 64 there, 32 here"),
    ],
)
def test_another_grid_is_refused_and_changes_nothing(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = GridFolder(tmp_path / "out")
    folder.open(grid(tmp_path))
    before = folder.grid.read_text()
    with pytest.raises(FolderError, match="out holds another grid: ") as error:
        folder.open(grid(tmp_path, **changes))
    assert said in str(error.value)
    assert folder.grid.read_text() == before


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("n" * 256, "File name too long"),
        ("b\udcff", "its name is not UTF-8"),
        ("file/x", "Not a directory"),
    ],
)
def test_a_folder_that_cannot_be_is_refused_to_runs_and_grids(
    name: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for open_it in (lambda p: RunFolder(p).open({}), lambda p: GridFolder(p).open(grid(tmp_path))):
        with pytest.raises(FolderError, match=rf"cannot be used \({why}\): give another --out"):
            open_it(tmp_path / name)


def test_a_file_and_a_folder_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="is a file: give a folder"):
        GridFolder(tmp_path / "file").open(grid(tmp_path))
    with pytest.raises(FolderError, match="not empty and holds no grid"):
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "thesis.txt").write_text("mine")
        GridFolder(tmp_path / "more").open(grid(tmp_path))


# ---- the timeline -------------------------------------------------------------------------------


def state(**phases: Phase) -> FleetState:
    jobs = {name: JobState(name, phase, device=0) for name, phase in phases.items()}
    return FleetState(FleetSettings(), jobs)


def test_the_timeline_has_a_line_for_every_change_and_none_else(tmp_path: Path) -> None:
    times = iter(range(100))
    path = tmp_path / "timeline.jsonl"
    for _ in range(2):  # the program, and the same command again
        with Timeline(path, clock=lambda: float(next(times))) as timeline:
            for one in (state(a="ready", b="ready"), state(a="running", b="ready")):
                timeline.see(one, Restarted())
                timeline.see(one, Restarted())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    whole = ["begins", "a ready", "b ready", "a running", "ends"]
    assert [row.get("program") or f"{row['job']} {row['phase']}" for row in rows] == whole * 2
    assert [row["at"] for row in rows] == [*range(10)]


def test_a_line_that_a_kill_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text('{"at": 1.0, "program": "begins"}\n{"at": 2')
    with Timeline(path, clock=lambda: 5.0):
        pass
    assert path.read_text().splitlines()[1] == '{"at": 5.0, "program": "begins"}'


# ---- a job --------------------------------------------------------------------------------------


def test_the_best_is_a_finished_job_or_else_one_that_may_go_on() -> None:
    def best(**states: str) -> str:
        jobs = {
            name: JobResult(name, state, 3, float(number), 1.0, "", "", Path(name))
            for number, (name, state) in enumerate(states.items())
        }
        return FleetResult(jobs, {}, "val_loss", "min").best

    assert best(a="waiting", b="finished", c="finished") == "b"
    assert best(a="stopped", b="waiting", c="waiting") == "b"
    with pytest.raises(FleetError, match="none has finished with a val_loss"):
        best(a="stopped", b="failed")


def test_a_job_can_be_sent_to_another_process(tmp_path: Path) -> None:
    for point in grid(tmp_path).points:
        assert pickle.loads(pickle.dumps(GridJob(point.config))) == GridJob(point.config)


def test_what_a_job_says_goes_to_its_own_file_and_what_others_say_does_not(
    tmp_path: Path,
) -> None:
    root, screen = logging.getLogger(), io.StringIO()
    shown = logging.StreamHandler(screen)
    root.addHandler(shown)
    inside, other_said = threading.Event(), threading.Event()

    def job(name: str) -> None:
        with job_output(tmp_path / name) as console:
            console.print(f"progress of {name}")
            logging.getLogger("perfect").warning("a word of %s", name)
            inside.set()
            assert other_said.wait(60)

    try:
        thread = threading.Thread(target=job, args=("a",))
        thread.start()
        assert inside.wait(60)
        logging.getLogger("perfect").warning("a word of the fleet")
        other_said.set()
        thread.join(60)
        job("b")
        logging.getLogger("perfect").warning("the last word")
    finally:
        root.removeHandler(shown)
    assert screen.getvalue().splitlines() == ["a word of the fleet", "the last word"]
    for name in ("a", "b"):
        text = (tmp_path / name / OUTPUT).read_text()
        assert text.split() == f"progress of {name} a word of {name}".split()
