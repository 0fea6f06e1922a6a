"""Jobs of a fleet that read the same input: decoded once, and each job is what it is alone."""

import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fleet_outcomes import differences

from benchmarks.jobs.fleet_jobs import (
    BATCH,
    BUDGET,
    QUIET,
    JobKind,
    Outcome,
    add,
    alone,
    make,
    samples,
)
from loaders import ReuseLoader, Workers
from trainers.fleet.deciding.events import Event, TurnEnded
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.inputs import shared_inputs
from trainers.fleet.jobs.job_turns import FINAL, LAST, STOPPED

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
COUNT = 48
AHEAD = 4 * BATCH
"""Workers may begin with a pass that nobody asks for, and look at a sample beforehand."""


class Counted:
    """Samples in memory that count how often each was read. `made`: by all data sets together."""

    def __init__(self, reads: list[int] | None = None) -> None:
        self._samples = samples(COUNT)
        self._cached_reads = reads if reads is not None else []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self._cached_reads.append(index)
        return self._samples[index]


class Reading(JobKind):
    """A job with a `ReuseLoader`."""

    def train(self) -> ReuseLoader:  # type: ignore[override]
        return loader()


def loader(**options: Any) -> ReuseLoader:
    data = options.pop("data", None) or Counted()
    return ReuseLoader(
        data, BATCH, **{"workers": Workers(1, "thread"), "reuse": 1, "seed": 3, **options}
    )


KINDS: Mapping[str, JobKind] = {
    "adam": Reading(1),
    "sgd": Reading(2, "sgd", 24),
    "plain": Reading(4, "sgd", offload=False),
}


@pytest.fixture(scope="module")
def lone() -> Mapping[str, Outcome]:
    return {name: alone(kind, BUDGET) for name, kind in KINDS.items()}


NONE = {name: [] for name in KINDS}


@pytest.mark.parametrize(("window", "quantum"), [(64, 7), (3, 1), (3, 7)])
def test_three_jobs_over_one_loader_are_what_they_are_alone_with_one_decode_a_sample(
    lone: Mapping[str, Outcome], tmp_path: Path, window: int, quantum: int,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(shared_inputs, "WINDOW", window)
    data, waits = Counted(), []
    shared = loader(data=data)

    def see(state: FleetState, event: Event) -> None:
        if isinstance(event, TurnEnded) and event.waits_for:
            waits.append(event)

    fleet = make(tmp_path, quantum=quantum, watch=see)
    modules = {name: add(fleet, name, kind, train=shared) for name, kind in KINDS.items()}
    with caplog.at_level(logging.INFO):
        result = fleet.fit()
    assert {name: job.state for name, job in result.jobs.items()} == dict.fromkeys(
        KINDS, "finished"
    ), result.table()
    assert differences(lone, modules) == NONE
    assert 2 * COUNT <= len(data._cached_reads) <= 2 * COUNT + AHEAD
    assert shared.position.served == shared.position.pass_index == 0
    assert bool(waits) == (window == 3)
    assert "alone" not in caplog.text
    assert f"input shared by adam, sgd, plain: samples decoded: {2 * COUNT}" in caplog.text


def test_equal_loaders_that_each_job_makes_are_read_together_and_others_are_not(
    lone: Mapping[str, Outcome], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Reading(7)
    fleet = make(tmp_path, quantum=5)
    modules = {name: add(fleet, name, kind, train=kind.train) for name, kind in KINDS.items()}
    apart = add(fleet, "apart", other, train=lambda: loader(seed=4))
    with caplog.at_level(logging.INFO):
        said = fleet.explain()
        result = fleet.fit()
    assert "input shared by adam, sgd, plain: one decode a sample" in said.splitlines()
    assert {job.state for job in result.jobs.values()} == {"finished"}
    assert differences(lone, modules) == NONE
    expected = alone_with(other, loader(seed=4))
    assert expected.differences(Outcome.of(apart)) == []
    assert f"shared by adam, sgd, plain: samples decoded: {2 * COUNT}" in caplog.text


def alone_with(kind: JobKind, train: ReuseLoader) -> Outcome:
    class Kind(Reading):
        def train(self) -> ReuseLoader:  # type: ignore[override]
            return train

    return alone(Kind(kind.seed, kind.optimizer, kind.width, kind.offload), BUDGET)


def test_a_job_that_fails_one_that_is_stopped_and_one_that_comes_late_harm_nobody(
    lone: Mapping[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(shared_inputs, "WINDOW", 4)
    late = Reading(8, "sgd", offload=False)

    def meddle(state: FleetState, event: Event) -> None:
        steps = max((job.step for job in state.jobs.values()), default=0)
        if steps >= 7 and "late" not in state.jobs and not added:
            added.append("late")
            fleet.add("late", late.module, train=shared, trainer=late.trainer, offload=False,
                      val=late.val, seed=late.seed)  # fmt: skip
            fleet.stop("stopped")

    added: list[str] = []
    shared = loader()
    fleet = make(tmp_path, quantum=2, watch=meddle)
    modules = {name: add(fleet, name, kind, train=shared) for name, kind in KINDS.items()}
    add(fleet, "failing", Reading(9, fails_at=5), train=shared)
    add(fleet, "stopped", Reading(10), train=shared)
    with caplog.at_level(logging.WARNING):
        result = fleet.fit()
    states = {name: job.state for name, job in result.jobs.items()}
    assert states.pop("failing") == "failed" and states.pop("stopped") == "stopped"
    assert set(states.values()) == {"finished"} and "late" in states
    assert differences(lone, modules) == NONE
    final = torch.load(result.jobs["late"].folder / FINAL)["state_dict"]
    expected = alone(late, BUDGET).weights
    assert all(torch.equal(final[key], value) for key, value in expected.items())
    assert (result.jobs["stopped"].folder / STOPPED).exists()
    assert "alone" not in caplog.text, "who comes late has a stream of its own from the beginning"


@pytest.mark.parametrize("when", [2, 8])
def test_jobs_that_are_interrupted_go_on_with_the_same_bits(
    when: int, lone: Mapping[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(shared_inputs, "WINDOW", 5)
    asked: list[int] = []

    def interrupt(state: FleetState, event: Event) -> None:
        if not asked and any(job.step >= when for job in state.jobs.values()):
            asked.append(when)
            signal.raise_signal(signal.SIGINT)

    fleet = make(tmp_path, quantum=3, watch=interrupt)
    for name, kind in KINDS.items():
        add(fleet, name, kind, train=loader())
    with pytest.raises(KeyboardInterrupt):
        fleet.fit()
    caplog.clear()
    fleet = make(tmp_path, quantum=3)
    modules = {name: add(fleet, name, kind, train=loader()) for name, kind in KINDS.items()}
    with caplog.at_level(logging.INFO):
        result = fleet.fit()
    assert {job.state for job in result.jobs.values()} == {"finished"}
    assert differences(lone, modules) == NONE
    assert "reads pass" not in caplog.text, "who resumes elsewhere has a stream of its own"


@pytest.mark.parametrize("how", ["stopped", "interrupted"])
def test_a_job_that_waits_for_input_leaves_where_it_waits(
    how: str, lone: Mapping[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(shared_inputs, "WINDOW", 2)
    waited: dict[str, int] = {}

    def see(state: FleetState, event: Event) -> None:
        if isinstance(event, TurnEnded) and event.waits_for and event.step > 1 and not waited:
            waited[event.job] = event.step
            if how == "stopped":
                fleet.stop(event.job)
            else:
                signal.raise_signal(signal.SIGINT)

    shared = loader()
    fleet = make(tmp_path, quantum=20, watch=see)
    modules = {name: add(fleet, name, kind, train=shared) for name, kind in KINDS.items()}
    if how == "stopped":
        result = fleet.fit()
        [(job, step)] = waited.items()
        assert result.jobs[job].state == "stopped" and result.jobs[job].step == step
        assert (result.jobs[job].folder / STOPPED).exists()
        found = differences(lone, modules)
        assert found.pop(job) and set(map(tuple, found.values())) == {()}
        return
    with pytest.raises(KeyboardInterrupt):
        fleet.fit()
    [(job, step)] = waited.items()
    saved = torch.load(tmp_path / "jobs" / job / LAST, weights_only=False)
    assert saved["global_step"] == step, "it has left at once"
    assert "alone" not in caplog.text
    fleet = make(tmp_path, quantum=20)
    modules = {name: add(fleet, name, kind, train=shared) for name, kind in KINDS.items()}
    fleet.fit()
    assert differences(lone, modules) == NONE
