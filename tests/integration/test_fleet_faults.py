"""What goes wrong around a fleet while it runs, or between two runs: folders, disks, exceptions."""

import errno
import logging
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fleet_outcomes import states

from benchmarks.jobs.fleet_jobs import KINDS, QUIET, Outcome, add, alone, make
from trainers.fleet import Fleet, FleetError, Halving
from trainers.fleet.deciding.events import Event, Turn
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.deciding.halving import Seen
from trainers.fleet.jobs.job_turns import FINAL, LAST
from trainers.fleet.keeping.journal import NAME
from trainers.record_file import RecordFile

pytestmark = [
    pytest.mark.usefixtures("nothing_left_at_once"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
PLAIN = KINDS["plain"]


# ---- folders ------------------------------------------------------------------------------------


def test_the_folder_of_another_fleet_or_with_other_jobs_is_refused(tmp_path: Path) -> None:
    first = make(tmp_path)
    add(first, "a", PLAIN)
    first.fit()
    other = make(tmp_path, stop=Halving("val_loss", first=5))
    add(other, "a", PLAIN)
    with pytest.raises(FleetError, match=r"is the journal of another fleet.*Give another folder"):
        other.fit()
    less = make(tmp_path)
    add(less, "b", PLAIN)
    with pytest.raises(FleetError, match="has jobs that were not added: a"):
        less.fit()
    again = make(tmp_path)
    add(again, "a", PLAIN)
    assert states(again.fit()) == {"a": "finished"}


# ---- a full disk, and an exception from outside -------------------------------------------------


@dataclass(frozen=True)
class Abreast:
    """A stop rule that stops nobody: at these steps jobs wait for each other."""

    looks: tuple[int, ...]
    metric: str = "val_loss"

    def next_look(self, step: int) -> int | None:
        return next((look for look in self.looks if look > step), None)

    def judge(self, seen: Seen, gone: Mapping[str, str]) -> Mapping[str, str]:
        return {}

    def waits(self, job: str, seen: Seen, alive: Collection[str]) -> bool:
        return any(max(seen[job]) not in seen[other] for other in alive)


def full_for(folder: Path, monkeypatch: pytest.MonkeyPatch, spared: int = 0) -> list[Path]:
    """Let no checkpoint of this folder be written but the first ones. Return who was refused."""
    rename, seen, refused = os.replace, list[Path](), list[Path]()

    def replaced(source: Any, target: Any) -> None:
        if Path(target).parent == folder:
            seen.append(Path(target))
            if len(seen) > spared:
                refused.append(Path(target))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target)

    monkeypatch.setattr("trainers.atomic_checkpoint.os.replace", replaced)
    return refused


def test_a_full_disk_leaves_a_job_its_older_checkpoint_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "jobs" / "full"

    class LastTurn(Exception):
        """It stands for a kill."""

    reached: dict[str, int] = {}

    def kill(state: FleetState, event: Event) -> None:
        reached.update({name: job.step for name, job in state.jobs.items()})
        if min(reached.values()) >= 6:
            raise LastTurn

    kind, rule = replace(PLAIN, epochs=3), Abreast((5, 10, 15))
    fleet = make(tmp_path, quantum=1, checkpoint_minutes=1e-9, watch=kill, stop=rule)
    for name in ("full", "good"):
        add(fleet, name, kind)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        refused = full_for(folder, patch, spared=2)
        with pytest.raises(LastTurn):
            fleet.fit()
    assert {path.name for path in refused} == {LAST}
    assert f"could not write checkpoint {folder / LAST}" in caplog.text
    assert "the previous one is intact" in caplog.text
    steps = {
        name: torch.load(tmp_path / "jobs" / name / LAST, weights_only=False)["global_step"]
        for name in ("full", "good")
    }
    assert steps["full"] == 2 and abs(reached["good"] - steps["good"]) <= 1
    again = make(tmp_path, stop=rule)
    modules = {name: add(again, name, kind) for name in ("full", "good")}
    assert states(again.fit()) == {"full": "finished", "good": "finished"}
    lone = alone(kind)
    assert {name: lone.differences(Outcome.of(m)) for name, m in modules.items()} == {
        "full": [], "good": [],
    }  # fmt: skip


def test_final_weights_that_cannot_be_written_are_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make(tmp_path)
    for name in ("full", "good"):
        add(fleet, name, PLAIN)
    full_for(tmp_path / "jobs" / "full", monkeypatch)
    result = fleet.fit()
    assert states(result) == {"full": "failed", "good": "finished"}
    assert FINAL in result.jobs["full"].why and "could not be written" in result.jobs["full"].why


@pytest.mark.parametrize(("spared", "kept"), [(0, 0), (1, 1)])
def test_ctrl_c_on_a_full_disk_claims_no_checkpoint_that_is_not_there(
    spared: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(state: FleetState, event: Event) -> None:
        if min(job.step for job in state.jobs.values()) == 3 and not state.interrupted:
            signal.raise_signal(signal.SIGINT)

    kind = replace(PLAIN, epochs=3)
    fleet = make(tmp_path, quantum=1, checkpoint_minutes=1e-9, watch=interrupt)
    for name in ("full", "good"):
        add(fleet, name, kind)
    with monkeypatch.context() as patch:
        full_for(tmp_path / "jobs" / "full", patch, spared)
        with pytest.raises(KeyboardInterrupt) as said:
            fleet.fit()
    assert fleet.result().jobs["full"].step == kept
    count = "2 jobs are checkpointed" if kept else "1 job is checkpointed, 1 begins anew,"
    assert f"{count} in {tmp_path}: the same program goes on" in str(said.value)
    again = make(tmp_path)
    modules = {name: add(again, name, kind) for name in ("full", "good")}
    assert states(again.fit()) == {"full": "finished", "good": "finished"}
    lone = alone(kind)
    assert not any(lone.differences(Outcome.of(module)) for module in modules.values())


def full(file: RecordFile, record: Mapping[str, Any]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_journal_that_cannot_be_written_ends_the_run_and_the_same_program_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(state: FleetState, event: Event) -> None:
        if state.jobs["a"].step == 3:
            monkeypatch.setattr(RecordFile, "append", full)

    fleet = make(tmp_path, quantum=1, watch=fill, checkpoint_minutes=1e-9)
    add(fleet, "a", PLAIN)
    before = torch.get_rng_state()
    with pytest.raises(FleetError, match=rf"{NAME} could not be written.*No space left.*goes on"):
        fleet.fit()
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state is restored"
    monkeypatch.undo()
    again = make(tmp_path)
    module = add(again, "a", PLAIN)
    assert states(again.fit()) == {"a": "finished"}
    assert alone(PLAIN).differences(Outcome.of(module)) == []


def test_an_exception_in_watch_ends_a_long_turn_after_its_step(tmp_path: Path) -> None:
    class StepFailed(Exception):
        """It comes while the job has a turn of half a million steps."""

    def watch(state: FleetState, event: Event) -> None:
        if isinstance(state.busy[0], Turn):
            raise StepFailed

    fleet = make(tmp_path, quantum=500_000, watch=watch)
    long = add(fleet, "long", replace(PLAIN, epochs=100_000))
    with pytest.raises(StepFailed):
        fleet.fit()
    assert len(long.draws) < 100_000


@pytest.mark.parametrize("step", [6, 7])
def test_a_job_that_goes_on_knows_the_metric_from_before_at_its_next_rung(
    step: int, tmp_path: Path
) -> None:
    class Killed(Exception):
        """It comes after the first validation and before the next one. At step 7 the job is under
        way to its rung, and nobody will hear that it reached it."""

    def kill(state: FleetState, event: Event) -> None:
        if state.jobs["a"].step == step:
            raise Killed

    def begun(watch: Any = None) -> Fleet:
        rule = Abreast((8,))
        fleet = make(tmp_path, quantum=1, checkpoint_minutes=1e-9, stop=rule, watch=watch)
        add(fleet, "a", PLAIN)
        return fleet

    with pytest.raises(Killed):
        begun(kill).fit()
    result = begun().fit()
    assert states(result) == {"a": "finished"}, result.table()
    assert result.history["a"][8] == result.history["a"][5] != result.history["a"][10]
