"""A grid of runs through the program: its jobs are the runs alone, and it ends as a run does."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.run_folders import logged
from torch.utils import _pytree as pytree

from trainers.steps.plan_request import PlanRequest

ROOT = Path(__file__).parents[2]
Train = Callable[..., tuple[int, Path]]
Recipe = dict[str, Any]
RATES = (0.05, 0.01)
NAMES = ["lr=0.05,seed=3", "lr=0.01,seed=3"]


@pytest.fixture
def grid(recipe: Recipe) -> Recipe:
    """Two jobs of 20 steps, in turns of 3."""
    recipe["phases"] = [
        {"name": "pretrain", "passes": 1, "reuse": 2, "lr": {"kind": "constant", "lr": 0.05}},
        {"name": "finetune", "passes": 1, "batch_size": 12, "lr": {"kind": "linear", "lr": 0.05}},
    ]
    del recipe["ema"]
    recipe["trainer"]["validate_every"] = 0.5
    recipe["grid"] = {"phases.0.lr.lr, phases.1.lr.lr": [*RATES], "seed": [3]}
    recipe["fleet"] = {"quantum": 3, "metric": "val_accuracy", "mode": "max"}
    return recipe


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found, _ = pytree.tree_flatten_with_path(torch.load(path, weights_only=True)["state_dict"])
    return {pytree.keystr(at): leaf for at, leaf in found}


def assert_same_runs(one: Path, two: Path) -> None:
    assert logged(one) == logged(two)
    left, right = tensors(one / "final.ckpt"), tensors(two / "final.ckpt")
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    runs = [json.loads((folder / "run.json").read_text()) for folder in (one, two)]
    for key in ("status", "accuracy", "steps", "decoded_samples", "served_samples", "config"):
        assert runs[0][key] == runs[1][key], key


def tiny_grid(text: Path) -> Recipe:
    """Our tiny grid, on that text and of 12 steps."""
    recipe = yaml.safe_load((ROOT / "configs" / "gpt2" / "grid_tiny.yaml").read_text())
    recipe["data"] |= {"root": str(text), "vocabulary": 258, "evaluation_samples": 20}
    recipe["phases"][0]["steps"] = 12
    recipe["trainer"] |= {"threads": 1, "validate_every": 0.02}
    return recipe


def journal(folder: Path) -> list[str]:
    path = folder / "journal.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_turns(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Returns once so many turns have ended."""
    while sum('"TurnEnded"' in line for line in journal(folder)) < count:
        assert process.poll() is None, f"ended too early: {process.communicate()[1]}"
        try:
            process.wait(timeout=0.01)
        except subprocess.TimeoutExpired:
            continue


# ---- exactness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["plain", "within half of the bytes"])
def test_every_job_of_a_grid_is_the_run_alone_to_the_last_bit(
    train: Train, grid: Recipe, offload: str, share: Callable[[int, Recipe], str]
) -> None:
    alone = {key: value for key, value in grid.items() if key not in ("grid", "fleet")}
    if offload != "plain":
        alone["offload"] = {"budget": share(50, alone)}
        grid["offload"] = alone["offload"]
    code, folder = train(grid, out="grid")
    assert code == 0
    assert sorted(path.name for path in (folder / "jobs").iterdir()) == sorted(NAMES)
    for name, rate in zip(NAMES, RATES, strict=True):
        point = yaml.safe_load(yaml.safe_dump(alone)) | {"seed": 3}
        for phase in point["phases"]:
            phase["lr"]["lr"] = rate
        code, single = train(point, out=f"alone-{name}")
        assert code == 0
        assert_same_runs(folder / "jobs" / name, single)


def test_jobs_with_dropout_draw_their_own_numbers_in_any_order_of_turns(
    train: Train, text: Path
) -> None:
    alone = tiny_grid(text)
    del alone["grid"], alone["fleet"]
    grid = alone | {"grid": {"seed": [1, 2]}, "fleet": {"quantum": 2}}
    code, folder = train(grid, out="grid")
    assert code == 0
    for seed in (1, 2):
        code, single = train(alone | {"seed": seed}, out=f"alone-{seed}")
        assert code == 0
        assert_same_runs(folder / "jobs" / f"seed={seed}", single)


def test_the_same_command_goes_on_after_a_kill_and_ends_the_same(
    train: Train, start: Callable[..., subprocess.Popen[str]], grid: Recipe, tmp_path: Path
) -> None:
    grid["checkpoint"] = {"every_steps": 2}
    _, whole = train(grid, out="whole")
    process = start(grid, "grid")
    wait_for_turns(process, tmp_path / "grid", 6)
    process.kill()
    process.communicate()
    code, folder = train(grid, out="grid")
    assert code == 0
    for name in NAMES:
        assert_same_runs(folder / "jobs" / name, whole / "jobs" / name)
    resumed = [json.loads((folder / "jobs" / n / "run.json").read_text()) for n in NAMES]
    assert any(run["resumed_at"] for run in resumed)
    assert "The program began again at a dashed line" in (folder / "report.html").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_every_job_write_a_checkpoint_and_says_so_once(
    train: Train,
    start: Callable[..., subprocess.Popen[str]],
    grid: Recipe,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    _, whole = train(grid, out="whole")
    process = start(grid, "grid")
    wait_for_turns(process, tmp_path / "grid", 4)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert said.count("the same") == 1
    assert json.loads((tmp_path / "grid" / "grid.json").read_text())["status"] == "interrupted"
    code, folder = train(grid, out="grid")
    assert code == 0
    for name in NAMES:
        assert_same_runs(folder / "jobs" / name, whole / "jobs" / name)


def test_a_grid_whose_time_is_over_says_so_and_the_same_command_goes_on(
    train: Train, grid: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    grid["fleet"]["hours"] = 1e-9  # it is over before the first job is built
    code, folder = train(grid, out="grid")
    assert code == 0
    assert "the time is over: 0 jobs are checkpointed, 2 begin anew," in capfd.readouterr().err
    results = json.loads((folder / "grid.json").read_text())
    assert results["status"] == "out of time"
    assert all("h were over at step 0" in job["why"] for job in results["jobs"])
    grid["fleet"]["hours"] = 20
    assert train(grid, out="grid")[0] == 0
    results = json.loads((folder / "grid.json").read_text())
    assert results["status"] == "completed"
    assert {job["state"] for job in results["jobs"]} == {"finished"}


# ---- what is said and kept ----------------------------------------------------------------------


def test_a_grid_leaves_its_results_and_a_page_over_all_jobs(
    train: Train, grid: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    code, folder = train(grid, out="grid")
    assert code == 0
    shown = capfd.readouterr().err
    results = json.loads((folder / "grid.json").read_text())
    ranked = [job["metric"] for job in results["jobs"]]
    assert ranked == sorted(ranked, reverse=True), "best first"
    assert results["status"] == "completed"
    settings = {job["name"]: job["settings"] for job in results["jobs"]}
    assert settings == {f"lr={rate},seed=3": {"lr": rate, "seed": 3} for rate in RATES}
    assert f"report: {folder / 'report.html'}" in shown
    assert "step 3" not in shown, "a line a change of state, and not one a step"
    for name in NAMES:
        assert f"{name}  training" in shown
        assert f"{name}  finished" in shown
        output = (folder / "jobs" / name / "output.txt").read_text()
        assert "report: " in output
        assert output.count("test accuracy") == 1
    assert shown.count("report: ") == 1, "what jobs say is in their files"
    page = (folder / "report.html").read_text()
    best = results["jobs"][0]["name"]
    assert f"&quot;{best}&quot; is best" in page
    assert "Who waited for what" in page
    assert "Waits for its turn" in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    # Of a grid that is complete, the same command only says what came of it.
    before = [(folder / "jobs" / name / "run.json").read_bytes() for name in NAMES]
    assert train(grid, out="grid")[0] == 0
    assert [(folder / "jobs" / name / "run.json").read_bytes() for name in NAMES] == before


def test_the_better_half_goes_on_and_the_others_say_why_not(
    train: Train, grid: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    grid["fleet"]["stop"] = {"rule": "halving", "first": 9, "eta": 2}
    code, folder = train(grid, out="grid")
    assert code == 0, "a job that is stopped early has not failed"
    results = json.loads((folder / "grid.json").read_text())
    finished, stopped = results["jobs"]
    assert (finished["state"], finished["step"]) == ("finished", 20)
    assert (stopped["state"], stopped["step"]) == ("stopped", 9)
    assert "at step 9 is number 2 of 2" in stopped["why"]
    run = json.loads((folder / stopped["folder"] / "run.json").read_text())
    assert run["status"] == "stopped"
    assert "only the best one goes on" in capfd.readouterr().err
    assert "stopped: val_accuracy" in (folder / "report.html").read_text()


def test_a_search_tries_some_points_and_goes_on_where_it_was(train: Train, grid: Recipe) -> None:
    pytest.importorskip("optuna")
    grid["grid"]["seed"] = [3, 4]
    grid["fleet"]["search"] = {"sampler": "RandomSampler", "trials": 3, "at_once": 2, "seed": 1}
    code, folder = train(grid, out="grid")
    assert code == 0
    jobs = json.loads((folder / "grid.json").read_text())["jobs"]
    assert sorted(job["name"] for job in jobs) == ["trial-0000", "trial-0001", "trial-0002"]
    for job in jobs:
        config = json.loads((folder / job["folder"] / "run.json").read_text())["config"]
        rates = {phase["lr"]["lr"] for phase in config["phases"]}
        assert (rates, config["seed"]) == ({job["settings"]["lr"]}, job["settings"]["seed"])
    assert train(grid, out="grid")[0] == 0
    assert json.loads((folder / "grid.json").read_text())["jobs"] == jobs
    grid["fleet"]["search"]["sampler"] = "RandomSampeler"
    assert train(grid, out="other")[0] == 2


def test_check_plans_equal_steps_once_and_says_of_every_job_what_it_says_of_it_alone(
    train: Train, grid: Recipe, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    plan = PlanRequest.plan
    monkeypatch.setattr(
        PlanRequest, "plan", lambda *given, **more: planned.append(given) or plan(*given, **more)
    )
    grid["offload"] = {}
    grid["grid"] |= {"seed": [3, 4], "phases.0.passes": [1, 2], "loader.batch_size": [8, 10]}
    code, folder = train(grid, "--check", out="grid")
    assert code == 0
    assert not folder.exists()
    said = capfd.readouterr().out
    assert len(planned) == 4, "neither a rate nor a seed makes another step"
    told = {line.split()[0]: line.split() for line in said.splitlines() if line.startswith("lr=")}
    assert len(told) == 16
    lengths = {"passes=1,batch_size=8": 20, "passes=2,batch_size=8": 35,
               "passes=1,batch_size=10": 17, "passes=2,batch_size=10": 29}  # fmt: skip
    for name, words in told.items():
        assert int(words[1]) == lengths[name.partition(",")[2].partition(",")[2]], name
    readers = [line for line in said.splitlines() if line.startswith("input shared by")]
    assert len(readers) == 4, "points of one seed and batch size read together"
    grid["grid"] = {"phases.0.lr.lr": [0.01], "seed": [4], "phases.0.passes": [2]}
    assert train(grid, "--check", out="grid")[0] == 0
    alone = [
        line.split() for line in capfd.readouterr().out.splitlines() if "of the device" in line
    ]
    same = told["lr=0.01,seed=4,passes=2,batch_size=8"]
    assert [words[1:2] + words[6:15] for words in alone] == [same[1:2] + same[6:15]]


# ---- what is refused, and what fails ------------------------------------------------------------


def test_a_grid_that_cannot_be_read_is_refused_with_every_line(
    train: Train, grid: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    grid["grid"] = {"optimzer.lr": [1e-3], "seed": [0, -1]}
    code, folder = train(grid, out="grid")
    assert code == 2
    said = capfd.readouterr().err
    assert "unknown key 'optimzer.lr'; did you mean 'optimizer.lr'?" in said
    assert "grid.seed.1: " in said
    assert not folder.exists()


def test_the_folder_of_another_grid_or_of_a_run_is_refused(
    train: Train, grid: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "thesis.txt").write_text("mine")
    assert train(grid, out="grid")[0] == 2
    assert "holds no grid" in capfd.readouterr().err
    (tmp_path / "grid" / "thesis.txt").unlink()
    grid["grid"] = {"seed": [0]}
    assert train(grid, out="grid")[0] == 0
    grid["fleet"]["quantum"] = 7  # how jobs are run may change
    assert train(grid, out="grid")[0] == 0
    grid["grid"]["seed"] = [0, 1]
    capfd.readouterr()
    assert train(grid, out="grid")[0] == 2
    assert "grid holds another grid: grid.seed is [0] there, [0, 1] here" in capfd.readouterr().err


def test_a_job_that_fails_is_named_and_the_others_go_on(
    train: Train, grid: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    grid["grid"] = {"loader.batch_size": [8, 4000], "seed": [0]}
    code, folder = train(grid, out="grid")
    assert code == 1
    states = {
        job["name"]: job["state"] for job in json.loads((folder / "grid.json").read_text())["jobs"]
    }
    assert states == {"batch_size=8,seed=0": "finished", "batch_size=4000,seed=0": "failed"}
    said = capfd.readouterr().err
    assert "batch_size=4000,seed=0 failed: " in said
    assert "loader.batch_size: 4000 is larger than the training set" in said
    assert "failed after 0 steps" in (folder / "report.html").read_text()
