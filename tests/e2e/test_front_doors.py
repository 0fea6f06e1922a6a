"""How every command begins: what it says before anything heavy is imported, and what it refuses."""

import logging
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml

from loaders import ReuseLoader
from loaders.augment import Flip
from perfect import OffloadStrategy, list_runs, train
from perfect.command_line import importing
from perfect.errors import FolderError
from perfect.grids import grid_run
from perfect.grids.grid_fleet import fit_of
from perfect.runs.kept_runs import put_aside
from trainers.fleet import Fleet, Halving
from trainers.folder_lock import hold_folder

pytestmark = pytest.mark.cold

Recipe = dict[str, Any]
Train = Callable[..., tuple[int, Path]]

LIGHT = """
import contextlib, importlib, io, sys
bad = sys.argv[1]
calls = [(name, ["--help"]) for name in ("train", "compare", "anchor", "replay", "list_runs")]
calls += [(name, ["--no-such-option"]) for name, _ in calls]
calls += [("train", ["--version"]), ("train", ["--print-completion", "bash"]), ("train", [bad]),
          ("train", [bad, "--set", "loader.batchsize=3"]), ("list_runs", ["ls", sys.argv[2]])]
for name, options in calls:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = importlib.import_module(f"perfect.{name}").main(options)
        except SystemExit as left:
            code = left.code
    heavy = {"torch", "lightning", "matplotlib"} & sys.modules.keys()
    print(name, *options[:1], code, *heavy)
"""


def test_no_command_imports_torch_for_its_help_an_option_or_a_wrong_yaml(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: {name: resnet8}\ndata: {nam: cifar10}\nphases: []\n")
    script = [sys.executable, "-c", LIGHT, str(bad), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    names = ("train", "compare", "anchor", "replay", "list_runs")
    assert done.stdout.splitlines() == [
        *(f"{name} --help 0" for name in names),
        *(f"{name} --no-such-option 2" for name in names),
        "train --version 0",
        "train --print-completion 0",
        *[f"train {bad} 2"] * 2,
        "list_runs ls 2",
    ]


@pytest.mark.parametrize(
    ("options", "level"),
    [(["-v"], logging.INFO), (["-vv"], logging.DEBUG), (["-q"], logging.ERROR)],
)
def test_v_logs_more_of_every_package_and_q_only_errors(
    options: list[str], level: int, tmp_path: Path
) -> None:
    assert train.main([str(tmp_path / "none.yaml"), *options]) == 2
    packages = ("perfect", "loaders", "offload", "trainers")
    assert {logging.getLogger(name).level for name in packages} == {level}
    train.main([str(tmp_path / "none.yaml")])


def test_python_m_perfect_lists_every_command() -> None:
    command = [sys.executable, "-m", "perfect"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in ("train", "runs", "compare", "anchor", "replay"):
        assert f"\nperfect-{name}" in f"\n{said}"


def test_ctrl_c_is_one_line_also_while_libraries_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_run", interrupted)
    assert train.main(["run.yaml"]) == 130
    assert capsys.readouterr().err == "perfect-train: stopped by Ctrl-C\n"
    left: list[int] = []
    monkeypatch.setattr("os._exit", left.append)
    with importing():
        signal.raise_signal(signal.SIGINT)
    assert left == [130]
    assert capsys.readouterr().err == "stopped by Ctrl-C before anything began\n"


# ---- perfect-train ------------------------------------------------------------------------------


def test_values_of_set_are_checked_and_kept_and_what_is_wrong_names_the_option(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--set", "loader.batchsize=3", "--set", "loader.batch_size=x", "--set", "seed"]
    assert train(recipe, *wrong)[0] == 2
    said = capfd.readouterr().err.splitlines()
    assert "--set loader.batch_size=x: must be a valid integer, not 'x'" in said
    assert any("--set loader.batchsize=3: unknown key" in line for line in said)
    assert any("--set seed: give a key and its value" in line for line in said)
    given = ["--set", "loader.batch_size=10", "--set", "phases.0.passes=1", "--quiet"]
    code, folder = train(recipe, *given)
    assert code == 0
    assert "importing" not in capfd.readouterr().err
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    assert (kept["loader"]["batch_size"], kept["phases"][0]["passes"]) == (10, 1)
    assert train(recipe)[0] == 2
    assert "loader.batch_size is 10 there, 8 here" in capfd.readouterr().err
    assert train(recipe, *given, "--resume")[0] == 0


def test_resume_refuses_to_begin_and_fresh_renames_what_is_there(
    train: Train,
    recipe: Recipe,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train(recipe, "--resume")[0] == 2
    assert "holds no run with a checkpoint" in capfd.readouterr().err
    recipe["phases"] = [{"name": "only", "steps": 2}]
    del recipe["ema"]
    with monkeypatch.context() as a_terminal:
        a_terminal.setenv("FORCE_COLOR", "1")  # rich takes it for one
        _, folder = train(recipe)
    assert re.search("test set.*━", capfd.readouterr().err), "the test set has a bar"
    before = (folder / "run.json").read_bytes()
    with hold_folder(folder):
        assert train(recipe, "--fresh")[0] == 2
        assert "a process trains in" in capfd.readouterr().err
    assert train(recipe, "--fresh")[0] == 0
    assert (folder.with_name("run.old-1") / "run.json").read_bytes() == before
    # ---- perfect-runs, on the two folders
    root = folder.parent
    assert list_runs.main(["ls", str(root)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        [str(folder), "completed", "2"],
        [str(root / "run.old-1"), "completed", "2"],
    ]
    assert list_runs.main(["show", str(folder)]) == 0
    said = capfd.readouterr().out
    assert "state            completed\n" in said
    assert re.search(r"\naccuracy +\d+\.\d\d %\n(.*\n)+wall +[\d.]+ s\n", said)
    assert list_runs.main(["cp", str(folder), str(root / "copy")]) == 0
    assert (root / "copy" / "final.ckpt").exists()
    assert list_runs.main(["cp", str(folder), str(root / "copy")]) == 2
    assert list_runs.main(["rm", str(root)]) == 2
    assert "holds no run" in capfd.readouterr().err
    assert list_runs.main(["rm", str(root / "copy")]) == 2  # nobody can answer here
    with hold_folder(root / "copy"):
        assert list_runs.main(["rm", "--yes", str(root / "copy")]) == 2
    assert list_runs.main(["rm", "--yes", *[str(root / "copy")] * 2]) == 0  # named twice
    assert not (root / "copy").exists() and folder.exists()
    (root / "copy.part" / "mine").mkdir(parents=True)
    assert list_runs.main(["cp", str(folder), str(root / "copy")]) == 2
    assert (root / "copy.part" / "mine").exists(), "what was there is nobody's to remove"


def test_a_running_grid_is_held_and_quiet_hides_its_board(
    train: Train, recipe: Recipe, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe["phases"] = [{"name": "only", "steps": 2}]
    del recipe["ema"]
    recipe |= {"grid": {"seed": [1, 2]}, "fleet": {}}
    seen: list[int] = []

    def looked_at(*given: Any) -> Any:
        for act in (["ls"], ["rm", "--yes"]):
            seen.append(list_runs.main([*act, str(tmp_path / "run")]))
        with pytest.raises(FolderError, match="a process trains in"):
            put_aside(tmp_path / "run")
        return fit_of(*given)

    monkeypatch.setattr(grid_run, "fit_of", looked_at)
    assert train(recipe, "--quiet")[0] == 0
    said = capfd.readouterr()
    assert seen == [0, 2]
    assert "a grid, running" in said.out
    assert said.err.count("seed=1") == 1  # in the table of results
    assert list_runs.main(["rm", "--yes", str(tmp_path / "run")]) == 0


def test_traceback_shows_where_an_error_came_from(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe["loader"]["batch_size"] = 4000
    assert train(recipe, "--check")[0] == 2
    assert "Traceback" not in capfd.readouterr().err
    assert train(recipe, "--check", "--traceback")[0] == 2
    assert "build_data" in capfd.readouterr().err


# ---- help() and repr() --------------------------------------------------------------------------


class Net(L.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr, self.layer = lr, torch.nn.Linear(12, 2)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_help_run_and_a_repr_says_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pictures = torch.rand(8, 3, 2, 2)
    dataset: Any = [(picture.numpy(), number % 2) for number, picture in enumerate(pictures)]
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    given: dict[str, Any] = globals() | {
        "dataset": dataset, "loader": loader, "train_loader": loader, "module": Net(),
        "folder": tmp_path / "fleet", "partial": partial, "Halving": Halving, "Flip": Flip,
    }  # fmt: skip
    ran: dict[type, dict[str, Any]] = {}
    for kind in (ReuseLoader, OffloadStrategy, Fleet):
        found = re.search(r"\n\n((?: {8}.*\n)+)", kind.__doc__ or "")
        assert found, kind
        exec(textwrap.dedent(found[1]), ran.setdefault(kind, dict(given)))
    assert ran[ReuseLoader]["images"].shape == (8, 3, 2, 2)
    assert ran[OffloadStrategy]["trainer"].global_step == 6
    jobs = ran[Fleet]["result"].jobs.values()
    assert sorted(job.state for job in jobs) == ["finished", "stopped", "stopped"]
    with ReuseLoader(dataset, batch_size=4, workers=1) as made:
        assert repr(made) == (
            "ReuseLoader(list, batch_size=4, reuse=3, mode='rolling', workers=1, seed=0)"
        )
    assert repr(OffloadStrategy(budget="8GiB")).startswith("OffloadStrategy(budget='8GiB', host_b")
    said = repr(ran[Fleet]["fleet"])
    assert said.startswith("Fleet(3 jobs on cpu, budget=None, stop=Halving(metric='train_loss'")
