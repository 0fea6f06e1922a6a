"""A run that is stopped, by Ctrl-C or kill -9, ends as if it had not been."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.products import only_first

from perfect.assembly import run
from perfect.runs.checkpoint import StopSignal

Train = Callable[..., tuple[int, Path]]
Recipe = dict[str, Any]
Outcome = Callable[[Path], dict[str, Any]]


def wait_for_checkpoint(process: subprocess.Popen[str], path: Path, count: int) -> None:
    """Returns once `path` was written `count` times."""
    seen = set[int]()
    while len(seen) < count:
        assert process.poll() is None, f"ended too early: {process.communicate()[1]}"
        if path.exists():
            seen.add(path.stat().st_mtime_ns)
        try:
            process.wait(timeout=0.002)
        except subprocess.TimeoutExpired:
            continue


@pytest.fixture
def long_recipe(recipe: Recipe) -> Recipe:
    """Enough steps that a signal arrives in time."""
    recipe["phases"][0]["passes"] = 6
    recipe["phases"][1]["passes"] = 8
    return recipe


@pytest.mark.parametrize("checkpoints", only_first([2, 3, 4], [1], [12]))
def test_a_killed_run_resumes_to_the_same_end(
    train: Train,
    start: Callable[..., subprocess.Popen[str]],
    long_recipe: Recipe,
    tmp_path: Path,
    outcome: Outcome,
    read_run: Callable[[Path], Recipe],
    checkpoints: list[int],
) -> None:
    _, whole = train(long_recipe, out="whole")
    for count in checkpoints:
        process = start(long_recipe)
        wait_for_checkpoint(process, tmp_path / "run" / "last.ckpt", count)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert read_run(tmp_path / "run")["status"] == "running"
    code, folder = train(long_recipe)
    assert code == 0
    assert outcome(folder) == outcome(whole)
    assert len(read_run(folder)["resumed_at"]) == len(checkpoints)
    assert steps_logged(folder) == steps_logged(whole)


@pytest.mark.parametrize("number", only_first(signal.SIGINT, signal.SIGTERM))
def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(
    train: Train,
    start: Callable[..., subprocess.Popen[str]],
    long_recipe: Recipe,
    tmp_path: Path,
    outcome: Outcome,
    read_run: Callable[[Path], Recipe],
    number: signal.Signals,
) -> None:
    long_recipe["trainer"]["accumulate"] = 2  # a checkpoint inside a window would lose gradients
    long_recipe["checkpoint"]["every_steps"] = 20
    _, whole = train(long_recipe, out="whole")
    process = start(long_recipe)
    wait_for_checkpoint(process, tmp_path / "run" / "last.ckpt", 1)
    process.send_signal(number)
    _, said = process.communicate()
    stopped = read_run(tmp_path / "run")
    assert process.returncode == 130
    assert "the same command resumes" in said
    assert "Traceback" not in said
    assert stopped["status"] == "interrupted"
    assert 0 < stopped["steps"] < read_run(whole)["steps"]
    assert (tmp_path / "run" / "report.html").exists()

    code, folder = train(long_recipe)
    assert code == 0
    assert read_run(folder)["resumed_at"] == [stopped["steps"]]
    assert outcome(folder) == outcome(whole)


@pytest.mark.parametrize("step", [4, 5, 6])
def test_a_run_that_is_stopped_at_any_step_logs_every_step_once(
    train: Train,
    recipe: Recipe,
    step: int,
    read_run: Callable[[Path], Recipe],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third step is logged, and Lightning does it after the step's checkpoint."""
    monkeypatch.setattr(run, "LOG_EVERY_STEPS", 3)
    _, whole = train(recipe, out="whole")
    batches = iter(range(1, 1000))
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "is_requested", lambda signal: next(batches) >= step)
        code, folder = train(recipe)
    assert code == 130
    assert read_run(folder)["steps"] >= step
    code, folder = train(recipe)
    assert code == 0
    assert steps_logged(folder) == steps_logged(whole)


def steps_logged(folder: Path) -> list[str]:
    rows = (folder / "metrics.csv").read_text().splitlines()[1:]
    return [row.partition(",")[0] for row in rows]
