"""Checkpoints of a stranger in the folders of a fleet and of a trial of Ray Tune: nothing in them
runs, and who reads one says what to do."""

import logging
import os
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fleet_outcomes import states

from benchmarks.twins.fleet_jobs import KINDS, QUIET, Net, add, make
from trainers.fleet.jobs.job_checkpoint import FINAL, LAST
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


@strange
def test_strange_final_weights_are_refused(write: Write, said: str, tmp_path: Path) -> None:
    fleet = make(tmp_path / "fleet")
    add(fleet, "a", PLAIN)
    fleet.fit()
    final = tmp_path / "fleet" / "jobs" / "a" / FINAL
    final.unlink()
    write(final)
    again = make(tmp_path / "fleet")
    add(again, "a", PLAIN)
    with pytest.raises(CheckpointRefused, match=said):
        again.fit()


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
