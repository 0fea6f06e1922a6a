"""What a grid's YAML means: its points, their names, and what a search makes of it.

What a wrong one is told is in `golden/grid_*.txt`, with test_config.py.
"""

from pathlib import Path

import pytest
import yaml

from perfect.config.grid import Grid, key_names, point_name, unlike, value_text
from perfect.config.grid_reader import read_recipe
from perfect.config.grid_schema import HalvingConfig
from perfect.errors import ConfigError

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


def test_a_section_that_the_run_leaves_out_is_made_for_a_value_in_it(tmp_path: Path) -> None:
    grid = read(f"{RUN}grid: {{model.lora.rank: [4, 8]}}\nfleet: {{}}", tmp_path)
    assert [p.config.model.lora and p.config.model.lora.rank for p in grid.points] == [4, 8]


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


def test_a_budget_is_given_once_and_a_job_has_one_device(tmp_path: Path) -> None:
    said = problems(
        f"{RUN}trainer: {{devices: 2}}\ngrid: {{offload.budget: [1GiB, 2GiB]}}\n"
        "fleet: {budget: 8GiB}",
        tmp_path,
    )
    assert said == [
        "grid.yaml:7: trainer.devices: is 2, but a job of a fleet runs on one device: give"
        " fleet.devices",
        "grid.yaml:8: grid.offload.budget: both fleet.budget and this limit a step's memory: give"
        " one of them",
    ]


@pytest.mark.parametrize("devices", ["auto", "2", "[0, 2]"])
def test_devices_are_all_or_a_number_or_a_list(devices: str, tmp_path: Path) -> None:
    grid = read(f"{RUN}grid: {{seed: [1]}}\nfleet: {{devices: {devices}}}", tmp_path)
    assert grid.fleet.devices == yaml.safe_load(devices)


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


def test_a_key_is_named_by_as_much_of_its_end_as_tells_it_from_the_others() -> None:
    assert key_names(["optimizer.lr, phases.0.lr.lr", "loader.batch_size"]) == ["lr", "batch_size"]
    assert key_names(["optimizer.lr", "phases.0.lr.lr", "seed"]) == [
        "optimizer.lr",
        "lr.lr",
        "seed",
    ]
    assert key_names(["loader.batch_size", "phases.0.batch_size", "phases.1.batch_size"]) == [
        "loader.batch_size",
        "0.batch_size",
        "1.batch_size",
    ]


def test_names_are_folders_and_no_two_are_equal() -> None:
    assert point_name(["lr", "b"], [1e-3, 8]) == "lr=1e-3,b=8"
    assert unlike(["a/b", "a_b", "a b", "a_b-2"]) == ["a_b", "a_b-2", "a_b-3", "a_b-2-2"]
    assert unlike(["../x", "x" * 500])[0] == "_x"
    assert len(unlike(["x" * 500])[0]) < 150
