"""Optuna's pruners as stop rules: their decisions, a journal that is read again, bad input."""

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fake_fleet import FakeFleet, Killed

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.search import OptunaPruner, optuna_pruner

optuna = pytest.importorskip("optuna")
pruners = optuna.pruners
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


def rule(pruner: Any, mode: Any = "min") -> OptunaPruner:
    return OptunaPruner(pruner, "val_loss", every=10, mode=mode)


def curves(jobs: int, rungs: int = 6) -> dict[str, dict[int, float]]:
    """Losses that fall to levels of their own, with noise."""
    dice = random.Random(jobs)
    levels = [dice.random() for _ in range(jobs)]
    return {
        f"job-{number:02}": {
            10 * rung: level + 1 / rung + dice.gauss(0, 0.05) for rung in range(1, rungs + 1)
        }
        for number, level in enumerate(levels)
    }


def optunas_own(pruner: Any, given: Mapping[str, Mapping[int, float]]) -> dict[str, int]:
    """By job, at which step Optuna's own loop prunes it, one trial after the other."""
    pruned: dict[str, int] = {}
    names = iter(given)

    def objective(trial: Any) -> float:
        job = next(names)
        for step, value in given[job].items():
            trial.report(value, step)
            if trial.should_prune():
                pruned[job] = step
                raise optuna.TrialPruned
        return list(given[job].values())[-1]

    study = optuna.create_study(study_name="fleet", pruner=pruner)
    study.optimize(objective, n_trials=len(given))
    return pruned


def fleet_of(folder: Path, given: Mapping[str, Mapping[int, float]], rule: Any) -> FakeFleet:
    fleet = FakeFleet(folder, rule=rule)
    for job, curve in given.items():
        fleet.add_program(job, lambda seat, curve=curve: curve)
    return fleet


PRUNERS = {
    "median": lambda: pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=15),
    "percentile": lambda: pruners.PercentilePruner(30.0, n_startup_trials=1, interval_steps=20),
    "threshold": lambda: pruners.ThresholdPruner(upper=1.2, n_warmup_steps=15),
    "patient": lambda: pruners.PatientPruner(None, patience=1),
    "patient median": lambda: pruners.PatientPruner(pruners.MedianPruner(1), patience=1),
    "asha": lambda: pruners.SuccessiveHalvingPruner(min_resource=10, reduction_factor=2),
    "asha with its own guess": lambda: pruners.SuccessiveHalvingPruner(reduction_factor=2),
    "hyperband": lambda: pruners.HyperbandPruner(10, 60, reduction_factor=2),
    "nop": lambda: pruners.NopPruner(),
}


@pytest.mark.parametrize("make", PRUNERS.values(), ids=[*PRUNERS])
def test_jobs_one_after_the_other_are_pruned_where_optunas_own_loop_prunes_them(
    make: Any, tmp_path: Path
) -> None:
    given = curves(9)
    fleet = fleet_of(tmp_path, given, rule(make()))
    result = fleet.fit()
    stopped = {job: max(fleet.seen[job]) for job, r in result.jobs.items() if r.state == "stopped"}
    assert stopped == optunas_own(make(), given)


def test_most_pruners_prune_something_and_spare_something() -> None:
    counts = {name: len(optunas_own(make(), curves(9))) for name, make in PRUNERS.items()}
    assert counts.pop("nop") == 0
    assert all(0 < count < 9 for count in counts.values()), counts


@pytest.mark.parametrize("name", ["median", "asha with its own guess", "hyperband"])
@pytest.mark.parametrize("killed_after", [1, 7, 20])
def test_a_journal_that_is_read_again_gives_the_same_decisions_in_any_order_of_turns(
    name: str, killed_after: int, tmp_path: Path
) -> None:
    given = curves(8)

    def run(journal: list[Any], kill_after: int, the_rule: OptunaPruner) -> FakeFleet:
        fleet = fleet_of(tmp_path, given, the_rule)
        fleet.journal, fleet._past, fleet.kill_after = journal, list(journal), kill_after
        # The turns depend on nothing but the journal, as those of a fleet do. Two jobs at a time:
        # the median pruner needs some that have finished before the others.
        fleet.turns = lambda living: random.Random(len(journal)).choice(living[:2])
        return fleet

    whole = run([], 10**9, rule(PRUNERS[name]()))
    whole.fit()
    assert "stopped" in whole.gone.values()
    journal: list[Any] = []
    first = rule(PRUNERS[name]())
    with pytest.raises(Killed):
        run(journal, killed_after, first).fit()
    for the_rule in (rule(PRUNERS[name]()), first):  # in a new process, and in the same one
        again = run(list(journal), 10**9, the_rule)
        again.fit()
        assert again.journal == whole.journal
        assert again.gone == whole.gone


def test_a_job_that_failed_or_was_stopped_by_hand_is_no_measure_for_the_others() -> None:
    seen = {"a": {10: 0.1}, "b": {10: 0.2}, "c": {10: 5.0}}
    for phases, stopped in (
        ({"a": "failed", "b": "failed"}, set()),
        ({"a": "stopped", "b": "finished"}, set()),
        ({"a": "finished", "b": "finished"}, {"c"}),
    ):
        verdict = rule(pruners.MedianPruner(n_startup_trials=2)).judge(seen, phases)
        assert set(verdict) == stopped, phases


def test_a_reason_says_who_where_and_what() -> None:
    seen = {"a": {10: 0.1}, "b": {10: 5.0}}
    verdict = rule(pruners.ThresholdPruner(upper=1.0)).judge(seen, {})
    assert verdict == {"b": "ThresholdPruner pruned it at step 10 with val_loss 5"}


def test_the_larger_value_is_better_where_the_mode_says_so() -> None:
    seen = {"a": {10: 1.0}, "b": {10: 0.5}}
    median = pruners.MedianPruner(n_startup_trials=1)
    assert set(rule(median, "max").judge(seen, {"a": "finished"})) == {"b"}
    assert set(rule(median, "min").judge(seen, {"a": "finished"})) == set()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"pruner": "MedianPruner"}, "'MedianPruner' as its pruner"),
        ({"metric": ""}, "metric=''"),
        ({"metric": None}, "metric=None"),
        ({"every": 0}, "every=0"),
        ({"every": 2.5}, "every=2.5"),
        ({"every": True}, "every=True"),
        ({"mode": "best"}, "mode='best'"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    good = {"pruner": pruners.NopPruner(), "metric": "val_loss", "every": 10}
    with pytest.raises(FleetError, match=says):
        OptunaPruner(**{**good, **arguments})


def test_a_pruner_that_lacks_its_own_package_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optuna_pruner, "find_spec", lambda package: None)
    with pytest.raises(FleetError, match="WilcoxonPruner needs the package scipy: pip install"):
        rule(pruners.WilcoxonPruner())


def test_without_optuna_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(FleetError, match=r"pip install '\.\[search\]'"):
        rule(pruners.NopPruner())
