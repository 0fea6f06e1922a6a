"""What a grid's YAML means, and what its program keeps beside the fleet's journal.

What a wrong one is told is in `golden/grid_*.txt`, with test_config.py.
"""

import io
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from perfect.config.grid import Grid, point_name, unlike, value_text
from perfect.config.grid_reader import read_recipe
from perfect.config.grid_schema import HalvingConfig
from perfect.errors import ConfigError, FolderError
from perfect.grids.grid_fleet import OUTPUT, job_output
from perfect.grids.grid_run import GridFolder, Timeline
from perfect.runs.folder import RunFolder
from trainers.fleet.deciding.events import FleetError, Restarted
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState, JobState, Phase
from trainers.fleet.keeping.fleet_result import FleetResult, JobResult

RUN = """\
model: {name: gpt2_tiny}
data: {name: wikitext2, sequence: 64}
optimizer: {name: adamw, lr: 5.0e-3}
phases:
  - {name: first, steps: 30, lr: {kind: constant, lr: 5.0e-3}}
  - {name: last, steps: 10, lr: {kind: linear, lr: 5.0e-3}}
"""


def read(text: str, folder: Path) -> Grid:
    path = folder / "grid.yaml"
    path.write_text(text, encoding="utf-8")
    grid, _ = read_recipe(path)
    assert isinstance(grid, Grid)
    return grid


def problems(text: str, folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(text, folder)
    return [problem.replace(f"{folder}/", "") for problem in error.value.problems]


def test_every_combination_is_a_point_in_the_order_of_the_file(tmp_path: Path) -> None:
    grid = read(
        f"{RUN}grid: {{loader.batch_size: [16, 8], seed: [1, 0, 2]}}\nfleet: {{}}", tmp_path
    )
    assert [point.name for point in grid.points] == [
        "batch_size=16,seed=1",
        "batch_size=16,seed=0",
        "batch_size=16,seed=2",
        "batch_size=8,seed=1",
        "batch_size=8,seed=0",
        "batch_size=8,seed=2",
    ]
    assert [(p.config.loader.batch_size, p.config.seed) for p in grid.points[2:4]] == [
        (16, 2),
        (8, 1),
    ]
    assert dict(grid.points[2].settings) == {"batch_size": 16, "seed": 2}


def test_a_key_of_several_paths_sets_all_of_them_to_the_same_value(tmp_path: Path) -> None:
    key = "optimizer.lr, phases.0.lr.lr, phases.1.lr.lr"
    grid = read(f"{RUN}grid:\n  {key}: [3e-4, 1e-3]\nfleet: {{}}", tmp_path)
    assert [point.name for point in grid.points] == ["lr=3e-4", "lr=1e-3"]
    for point, rate in zip(grid.points, (3e-4, 1e-3), strict=True):
        rates = [phase.lr.lr for phase in point.config.phases if phase.lr is not None]
        assert (point.config.optimizer.lr, *rates) == (rate, rate, rate)


def test_the_arguments_of_a_users_class_may_be_swept(tmp_path: Path) -> None:
    own = RUN.replace("{name: gpt2_tiny}", "{class_path: mypkg.Net, init_args: {width: 3}}")
    own = own.replace("optimizer: {name: adamw, lr: 5.0e-3}\n", "")
    text = f"{own}grid: {{model.init_args.width: [4, 8], model.init_args.name: [a/b]}}\nfleet: {{}}"
    points = read(text, tmp_path).points
    assert [p.config.model.init_args["width"] for p in points] == [4, 8]
    assert points[0].name == "width=4,name=a_b"


def test_a_search_has_no_points_until_it_asks_for_one(tmp_path: Path) -> None:
    grid = read(
        f"{RUN}grid: {{phases.1.lr.lr: [1e-3, 1e-4], loader.batch_size: [4, 8]}}\n"
        "fleet: {search: {trials: 3}}",
        tmp_path,
    )
    assert grid.points == ()
    point = grid.point_with((1e-4, 8))
    assert point.name == "lr=1e-4,batch_size=8"
    assert point.config.loader.batch_size == 8


def test_too_many_points_are_refused_unless_they_are_searched(tmp_path: Path) -> None:
    seeds, sizes = list(range(13)), list(range(1, 78))  # 1,001 points, of few values to read
    grid = f"grid: {{seed: {seeds}, loader.batch_size: {sizes}}}"
    [problem] = problems(f"{RUN}{grid}\nfleet: {{}}", tmp_path)
    assert problem == (
        "grid.yaml:7: grid: has 1,001 points: give at most 1,000, or fleet.search to try some"
    )
    read(f"{RUN}{grid}\nfleet: {{search: {{trials: 9}}}}", tmp_path)


def test_a_problem_of_two_values_together_names_their_point(tmp_path: Path) -> None:
    run = RUN.replace("optimizer: {name: adamw, lr: 5.0e-3}\n", "")
    swept = "grid: {optimizer.name: [sgd, adamw], optimizer.momentum: [0.9, 0.8]}\nfleet: {}"
    [problem] = problems(f"{run}{swept}", tmp_path)
    assert problem.startswith("grid.yaml:6: grid: in the point name=adamw,momentum=0.8: momentum")


@pytest.mark.parametrize(("first", "fits"), [(39, True), (40, False), (99, False)])
def test_the_first_rung_comes_before_the_shortest_job_ends(
    first: int, fits: bool, tmp_path: Path
) -> None:
    stop = f"{{rule: halving, first: {first}}}"
    text = f"{RUN}grid: {{phases.0.steps: [30, 70]}}\nfleet: {{stop: {stop}}}"
    if fits:
        assert read(text, tmp_path).fleet.stop == HalvingConfig(rule="halving", first=first)
    else:
        [problem] = problems(text, tmp_path)
        assert problem == (
            f"grid.yaml:8: fleet.stop.first: is {first}, but the shortest job has 40 steps, so it"
            " would never be judged: lower it"
        )


def test_jobs_have_several_devices_but_not_those_of_a_search(tmp_path: Path) -> None:
    grid = "grid: {optimizer.weight_decay: [0.1, 0.2]}\n"
    wide = f"{RUN}offload: {{devices: 1..4}}\n{grid}"
    made = read(f"{wide}fleet: {{migrate: false}}", tmp_path)
    assert [point.config.offload.devices for point in made.points if point.config.offload] == [
        "1..4", "1..4",
    ]  # fmt: skip
    assert not made.fleet.migrate
    search = "fleet: {search: {sampler: RandomSampler, trials: 2}}"
    [said] = problems(f"{wide}{search}", tmp_path)
    assert said.endswith("offload.devices: the jobs of a search have one device each: leave it out")
    swept = f"{RUN}offload: {{}}\ngrid: {{offload.devices: [1, 2]}}\n{search}"
    assert "the jobs of a search have one device each" in problems(swept, tmp_path)[0]
    [said] = problems(f"{RUN}offload: {{devices: 4..1}}\n{grid}fleet: {{}}", tmp_path)
    assert "must be a number of devices or a range such as 1..4, not '4..1'" in said


def test_a_budget_is_given_once_and_a_job_has_one_device(tmp_path: Path) -> None:
    said = problems(
        f"{RUN}trainer: {{devices: 2}}\ngrid: {{offload.budget: [1GiB, 2GiB]}}\n"
        "fleet: {budget: 8GiB}",
        tmp_path,
    )
    assert said == [
        "grid.yaml:7: trainer.devices: is 2, but the fleet chooses a job's devices: give"
        " offload.devices",
        "grid.yaml:8: grid.offload.budget: both fleet.budget and this limit a step's memory: give"
        " one of them",
    ]


def test_a_grid_that_is_written_out_complete_is_the_same_grid(tmp_path: Path) -> None:
    key = "optimizer.lr, phases.0.lr.lr"
    grid = read(f"{RUN}grid:\n  {key}: [3e-4, 1e-3]\nfleet: {{budget: 1 GiB}}", tmp_path)
    again = read(yaml.safe_dump(grid.dump(), sort_keys=False), tmp_path)
    assert (again.axes, again.fleet, again.points) == (grid.axes, grid.fleet, grid.points)


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0003, "3e-4"), (5e-05, "5e-5"), (0.1, "0.1"), (0.05, "0.05"), (1.0, "1"),
        (0.00025, "2.5e-4"), (123456.0, "123456"), (float("inf"), "inf"), (16, "16"),
        (True, "true"), (None, "null"), ("adamw", "adamw"), ([0.9, 0.95], "0.9-0.95"),
    ],
)  # fmt: skip
def test_a_value_is_written_short_and_with_all_its_digits(value: object, text: str) -> None:
    assert value_text(value) == text


def test_names_are_folders_and_no_two_are_equal() -> None:
    assert point_name(["lr", "b"], [1e-3, 8]) == "lr=1e-3,b=8"
    assert unlike(["a/b", "a_b", "a b", "a_b-2"]) == ["a_b", "a_b-2", "a_b-3", "a_b-2-2"]
    assert unlike(["../x", "x" * 500])[0] == "_x"
    assert len(unlike(["x" * 500])[0]) < 150


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
