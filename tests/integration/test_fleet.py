"""A fleet of one device: what its user sees, and that every job is what it is alone."""

import gc
import logging
import signal
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.accelerators import here, kept_of_each, on_each_accelerator
from support.fleet_outcomes import differences

from benchmarks.jobs import fleet_jobs
from benchmarks.jobs.fleet_jobs import (
    BUDGET,
    CPU,
    KINDS,
    QUIET,
    JobKind,
    Net,
    Outcome,
    add,
    alone,
)
from trainers.fleet import Fleet, FleetError, Halving
from trainers.fleet.deciding.events import Event, Planned, TurnEnded
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.jobs.job_turns import FINAL, LAST
from trainers.fleet.keeping.fleet_result import describe_unfinished

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


@kept_of_each
def outcomes_alone() -> Mapping[str, Outcome]:
    return {name: alone(kind, BUDGET, device()) for name, kind in KINDS.items()}


@pytest.fixture
def lone(accelerator: str) -> Mapping[str, Outcome]:
    return outcomes_alone()


def device() -> torch.device:
    """The device of the running test."""
    return CPU if here()["accelerator"] == "cpu" else torch.device("cuda", 0)


def make(folder: Path, **more: Any) -> Fleet:
    return fleet_jobs.make(folder, **{"devices": [str(device())], **more})


# ---- bits ---------------------------------------------------------------------------------------


@on_each_accelerator
@pytest.mark.parametrize("quantum", [3, None])
def test_jobs_of_a_fleet_are_what_they_are_alone_and_a_failing_one_harms_nobody(
    lone: Mapping[str, Outcome], tmp_path: Path, quantum: int | None, accelerator: str
) -> None:
    fleet = make(tmp_path, quantum=quantum)
    modules = {name: add(fleet, name, kind) for name, kind in KINDS.items()}
    add(fleet, "failing", JobKind(9, fails_at=4))
    before = torch.get_rng_state()
    result = fleet.fit()
    assert differences(lone, modules) == {name: [] for name in KINDS}
    assert torch.equal(torch.get_rng_state(), before), "the caller's own dice are put back"
    failed = result.jobs["failing"]
    assert failed.state == "failed" and "made to fail" in failed.why
    assert "on_train_batch_start" in failed.details, "the traceback is there"
    assert result.best == min(
        KINDS, key=lambda name: result.jobs[name].metric or 0.0
    ) and result.table().splitlines()[1].startswith(result.best)
    names = {thread.name for thread in threading.enumerate()}
    assert not [name for name in names if name.startswith("perfect-job")]


class Manual(Net):
    """It optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class ByHand(JobKind):
    def module(self) -> Net:
        L.seed_everything(self.seed, verbose=False)
        return Manual()


def test_a_job_that_optimizes_by_hand_is_what_it_is_alone(tmp_path: Path) -> None:
    fleet, kind = make(tmp_path, quantum=1), ByHand(8)
    modules = {"manual": add(fleet, "manual", kind), "adam": add(fleet, "adam", KINDS["adam"])}
    assert {job.state for job in fleet.fit().jobs.values()} == {"finished"}
    lone = {"manual": alone(kind, BUDGET, device()), "adam": alone(KINDS["adam"], BUDGET, device())}
    assert differences(lone, modules) == {"manual": [], "adam": []}


def test_a_job_that_seeds_the_whole_process_seeds_itself_alone(
    lone: Mapping[str, Outcome], tmp_path: Path
) -> None:
    class Seeding(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            L.seed_everything(0, verbose=False)
            torch.set_float32_matmul_precision("high")

    fleet = make(tmp_path, quantum=1)
    add(fleet, "seeding", KINDS["plain"], Seeding())
    modules = {"adam": add(fleet, "adam", KINDS["adam"])}
    assert fleet.fit().jobs["seeding"].state == "finished"
    assert differences(lone, modules) == {"adam": []}
    assert torch.get_float32_matmul_precision() == "highest"


# ---- early ends and late beginnings -------------------------------------------------------------


def test_halving_keeps_the_best_and_stopped_jobs_give_their_memory_back(tmp_path: Path) -> None:
    alive: list[weakref.ref[Net]] = []

    def maker(kind: JobKind) -> Any:
        def made() -> Net:
            module = kind.module()
            alive.append(weakref.ref(module))
            return module

        return made

    left: list[int] = []

    def count(state: FleetState, event: Event) -> None:
        if isinstance(event, TurnEnded) and sum(j.ended for j in state.jobs.values()) == 2:
            left.append(sum(ref() is not None for ref in alive))

    fleet = make(tmp_path, stop=Halving("val_loss", eta=3, first=5), watch=count, metric=None)
    for name in ("adam", "sgd", "plain"):
        add(fleet, name, KINDS[name], maker(KINDS[name]))
    result = fleet.fit()
    states = sorted(job.state for job in result.jobs.values())
    assert states == ["finished", "stopped", "stopped"]
    stopped = [job for job in result.jobs.values() if job.state == "stopped"]
    assert all(job.step == 5 and "only the best" in job.why for job in stopped)
    assert all((job.folder / "stopped.ckpt").exists() for job in stopped)
    at_rung = {name: seen[5] for name, seen in result.history.items()}
    assert result.best == min(at_rung, key=at_rung.__getitem__)
    assert left and left[-1] == 1, "only the last job's module is left"
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


@on_each_accelerator
def test_jobs_come_and_go_from_other_threads_while_the_fleet_runs(
    lone: Mapping[str, Outcome], tmp_path: Path, accelerator: str
) -> None:
    told, meddled = threading.Event(), threading.Event()

    def meddle() -> None:
        assert told.wait(60)
        kind = JobKind(21)
        fleet.add(
            "late", kind.module, train=kind.train, val=kind.val, trainer=kind.trainer, seed=21
        )
        fleet.stop("sgd")
        meddled.set()

    def watch(state: FleetState, event: Event) -> None:
        if isinstance(event, Planned):
            told.set()
            assert meddled.wait(60)  # before any job has ended

    fleet = make(tmp_path, quantum=1, watch=watch)
    other = threading.Thread(target=meddle)
    other.start()
    modules = {name: add(fleet, name, KINDS[name]) for name in ("adam", "sgd", "clipped")}
    result = fleet.fit()
    other.join()
    assert {name: job.state for name, job in result.jobs.items()} == {
        "adam": "finished", "sgd": "stopped", "clipped": "finished", "late": "finished",
    }  # fmt: skip
    del modules["sgd"]
    assert differences(lone, modules) == {"adam": [], "clipped": []}
    with pytest.raises(FleetError, match=r"after fit\(\) had ended"):
        add(fleet, "too late", KINDS["adam"])


def test_an_explained_fleet_says_what_sharing_brings_and_trains_afterwards(
    lone: Mapping[str, Outcome], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch")
    fleet = make(tmp_path)
    modules = {name: add(fleet, name, KINDS[name]) for name in ("adam", "sgd")}
    said = fleet.explain()
    lines = [line for line in caplog.messages if line.startswith(("GPU", "TPU", "💡"))]
    assert len({*lines}) == len(lines) >= 2, "each line of Lightning's banner comes once"
    assert "2 jobs on 1 device" in said and "bound" in said
    assert {job.step for job in fleet.result().jobs.values()} == {0}
    fleet.fit()
    assert differences(lone, modules) == {"adam": [], "sgd": []}


# ---- Ctrl-C -------------------------------------------------------------------------------------


class HandTimer(threading.Timer):
    """A timer that goes off when the test says so."""

    def start(self) -> None:
        HandTimer.goes_off = self.function


@on_each_accelerator
@pytest.mark.parametrize("how", ["ctrl-c", "time"])
def test_ctrl_c_and_the_end_of_the_time_checkpoint_every_job_and_the_same_program_goes_on(
    lone: Mapping[str, Outcome], tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(threading, "Timer", HandTimer)

    def interrupt(state: FleetState, event: Event) -> None:
        if isinstance(event, TurnEnded) and event.step == 3 and not state.interrupted:
            signal.raise_signal(signal.SIGINT) if how == "ctrl-c" else HandTimer.goes_off()

    names = ("adam", "sgd", "plain")
    fleet = make(tmp_path, quantum=1, watch=interrupt, hours=2.0, metric="val_loss")
    for name in names:
        add(fleet, name, KINDS[name])
    if how == "ctrl-c":
        with pytest.raises(KeyboardInterrupt, match="the same program goes on") as error:
            fleet.fit()
        result, said = fleet.result(), str(error.value)
    else:
        result = fleet.fit()
        said = describe_unfinished(result.unfinished, tmp_path)
        for job in result.unfinished:
            assert job.why == f"the 2 h were over at step {job.step}"
    assert {job.name for job in result.unfinished} == {*names}
    begun = [name for name in names if (tmp_path / "jobs" / name / LAST).exists()]
    assert begun and said.startswith(f"{len(begun)} job")
    if fresh := len(names) - len(begun):
        assert f", {fresh} begin" in said
    again = make(tmp_path, metric="val_loss")
    modules = {name: add(again, name, KINDS[name]) for name in names}
    assert {job.state for job in again.fit().jobs.values()} == {"finished"}
    assert differences(lone, modules) == {name: [] for name in names}


@on_each_accelerator
def test_a_job_of_higher_priority_has_the_device_after_the_step_under_way(
    tmp_path: Path, accelerator: str
) -> None:
    kinds = {"low": replace(KINDS["adam"], epochs=8), "high": KINDS["sgd"]}
    lone = {name: alone(kind, BUDGET, device()) for name, kind in kinds.items()}
    ran: list[tuple[str, str, int]] = []

    def see(state: FleetState, event: Event) -> None:
        ran.append((type(event).__name__, getattr(event, "job", ""), getattr(event, "steps", 0)))
        if isinstance(event, Planned) and event.job == "low":
            kind = kinds["high"]
            fleet.add(
                "high", kind.module, train=kind.train, val=kind.val,
                trainer=kind.trainer_on(device()), offload=kind.options_on(device()), priority=1,
            )  # fmt: skip

    fleet = make(tmp_path, quantum=1000, watch=see)
    low = add(fleet, "low", kinds["low"])
    result = fleet.fit()
    assert {job.state for job in result.jobs.values()} == {"finished"}
    names = [(kind, job) for kind, job, _ in ran]
    begun, over = names.index(("Planned", "high")), names.index(("Finished", "high"))
    assert {job for _, job in names[begun : over + 1]} == {"high"}
    [early, *_] = [steps for kind, job, steps in ran if (kind, job) == ("TurnEnded", "low")]
    assert early < 30
    assert not lone["low"].differences(Outcome.of(low))
    weights = torch.load(tmp_path / "jobs" / "high" / FINAL)["state_dict"]
    assert all(torch.equal(value, weights[key]) for key, value in lone["high"].weights.items())
