"""Checkpoints of a stranger in the folders of a fleet and of a trial of Ray Tune: nothing in them
runs, and who reads one says what to do."""

import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fleet_outcomes import states

from benchmarks.jobs.fleet_jobs import KINDS, QUIET, Net, add, make
from trainers.fleet.jobs.job_turns import FINAL, LAST
from trainers.fleet.ray_cluster import tune_trial
from trainers.read_checkpoint import CheckpointRefused

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
PLAIN = KINDS["plain"]


class Ruse:
    """Whoever unpickles it makes the folder `ran` where he is."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("ran",)


def saved(thing: object) -> Callable[[Path], object]:
    return lambda path: torch.save(thing, path)


RUNS_CODE = (
    r"ckpt was not loaded: it holds objects of posix\.mkdir, .*add_safe_globals\(\[mkdir\]\)"
)
DAMAGED = r"ckpt is damaged \(.*\): delete it"
STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "runs code": (saved({"global_step": 3, "state_dict": Ruse()}), RUNS_CODE),
    "a bare pickle": (lambda path: path.write_bytes(pickle.dumps(Ruse())), DAMAGED),
    "of torch 1.5": (
        lambda path: torch.save(Ruse(), path, _use_new_zipfile_serialization=False),
        DAMAGED,
    ),
    "a list": (saved([3]), DAMAGED),
    "steps and weights are text": (saved({"global_step": "x", "state_dict": "x"}), DAMAGED),
    "nothing in it": (saved({}), DAMAGED),
    "empty": (lambda path: path.write_bytes(b""), DAMAGED),
    "torn": (lambda path: path.write_bytes(b"PK\3\4 and no more"), DAMAGED),
    "a folder": (lambda path: path.mkdir(), DAMAGED),
}
strange = pytest.mark.parametrize(("write", "said"), STRANGE.values(), ids=STRANGE)
Write = Callable[[Path], object]


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("ran").exists()


@strange
def test_a_job_does_not_go_on_from_a_strange_checkpoint(
    write: Write, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "fleet" / "jobs" / "a"
    folder.mkdir(parents=True)
    write(folder / LAST)
    fleet = make(tmp_path / "fleet")
    for name in ("a", "b"):
        add(fleet, name, PLAIN)
    result = fleet.fit()
    assert states(result) == {"a": "failed", "b": "finished"}
    assert re.search(said, result.jobs["a"].why)


OF_ANOTHER = {"of another module": (saved({"state_dict": {}}), r"ckpt does not fit \(Error.*: add")}
FINALS = {**STRANGE, **OF_ANOTHER}


@pytest.mark.parametrize(("write", "said"), FINALS.values(), ids=FINALS)
def test_strange_final_weights_are_refused_and_the_other_jobs_have_theirs(
    write: Write, said: str, tmp_path: Path
) -> None:
    fleet = make(tmp_path / "fleet")
    trained = {name: add(fleet, name, PLAIN) for name in ("before", "a", "z")}
    fleet.fit()
    final = tmp_path / "fleet" / "jobs" / "a" / FINAL
    final.unlink()
    write(final)
    again = make(tmp_path / "fleet")
    modules = {name: add(again, name, PLAIN) for name in trained}
    with pytest.raises(CheckpointRefused, match=said):
        again.fit()
    assert states(again.result()) == dict.fromkeys(trained, "finished")
    for name in ("before", "z"):
        weights = zip(modules[name].parameters(), trained[name].parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in weights)


@strange
def test_a_trial_of_tune_does_not_go_on_from_a_strange_checkpoint(
    write: Write, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / tune_trial.FILE)
    before = SimpleNamespace(as_directory=lambda: nullcontext(str(tmp_path)))
    tune = SimpleNamespace(get_checkpoint=lambda: before)
    monkeypatch.setattr(tune_trial, "import_tune", lambda: tune)
    job = {"module": PLAIN.module, "train": PLAIN.train, "trainer": PLAIN.trainer, "offload": False}
    with pytest.raises(CheckpointRefused, match=said):
        tune_trial.tune_trainable(lambda config: job)({})


ADAM = replace(PLAIN, optimizer="adam")
TAMPERED: dict[str, list[tuple[list[Any], Any]]] = {
    "loops": [
        ([], {}), (["fit_loop"], 5), (["fit_loop", "epoch_progress"], {}),
        (["fit_loop", "epoch_progress", "current", "completed"], "x"),
        (["fit_loop", "epoch_loop.batch_progress", "total", "ready"], "x"),
    ],
    "optimizer_states": [
        ([0], 5), ([0], {}), ([0, "param_groups"], []), ([0, "state"], "x"),
        ([0, "state", 0, "exp_avg"], "x"), ([0, "state", 0], {"step": torch.tensor(3.0)}),
        ([0, "state", 0, "exp_avg"], torch.zeros(3, 3, 3)),
        ([0, "param_groups", 0, "betas"], 5), ([0, "param_groups", 0, "lr"], {}),
    ],
    "lr_schedulers": [([0], 5), ([0, "step_size"], "x"), ([0, "last_epoch"], "x")],
    "state_dict": [([], {}), (["net.0.weight"], torch.zeros(1, 2, 3)), (["net.0.weight"], "x")],
    "callbacks": [(["JobCheckpoint"], 5), (["JobCheckpoint", "logs"], 5)],
}  # fmt: skip


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that a job has left after its third step."""
    fleet = make(folder := tmp_path_factory.mktemp("fleet"), checkpoint_minutes=1e-9)
    add(fleet, "a", replace(ADAM, fails_at=3))
    fleet.fit()
    return folder / "jobs" / "a" / LAST


@pytest.mark.parametrize(
    ("part", "keys", "value"),
    [
        pytest.param(part, *one, id=f"{part}-{number}")
        for part, tried in TAMPERED.items()
        for number, one in enumerate(tried)
    ],
)
def test_a_job_names_the_part_of_a_checkpoint_that_was_tampered_with(
    part: str, keys: list[Any], value: Any, left: Path, tmp_path: Path
) -> None:
    checkpoint = torch.load(left, weights_only=True)
    assert checkpoint["global_step"] == 3
    place = checkpoint
    for key in (place_of := [part, *keys])[:-1]:
        place = place[key]
    place[place_of[-1]] = value
    folder = tmp_path / "fleet" / "jobs" / "a"
    folder.mkdir(parents=True)
    torch.save(checkpoint, folder / LAST)
    fleet = make(tmp_path / "fleet")
    add(fleet, "a", ADAM)
    why = fleet.fit().jobs["a"].why
    assert f"{folder / LAST} does not fit (its {part}: " in why and "\n" not in why


def test_what_a_module_raises_by_itself_is_no_fault_of_its_checkpoint(
    left: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "fleet" / "jobs" / "a"
    folder.mkdir(parents=True)
    shutil.copy(left, folder / LAST)
    fleet = make(tmp_path / "fleet")
    add(fleet, "a", replace(ADAM, fails_at=3))
    assert fleet.fit().jobs["a"].why == "ValueError: this job was made to fail"


class Keeps(Net):
    """A module that keeps an object of its own in its checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = Settings()


class Settings:
    pass


def test_a_job_that_could_not_go_on_from_its_checkpoint_says_so_when_it_writes_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = make(tmp_path / "fleet", checkpoint_minutes=1e-9)
    add(fleet, "a", PLAIN, Keeps)  # pyright: ignore[reportArgumentType]
    with caplog.at_level(logging.WARNING):
        assert states(fleet.fit()) == {"a": "finished"}
    told = [line for line in caplog.messages if "holds objects of" in line]
    assert len(told) == 1 and "Settings, and loading them may run code: allow" in told[0]
