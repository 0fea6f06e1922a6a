"""Optuna's samplers as a source of jobs: what they are asked and told, restarts, bad input."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_fleet import FakeFleet, Killed
from support.fake_fleet import SearchedFleet as Fleet

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.search import OptunaPruner, OptunaSearch, optuna_pruner_of, optuna_search_of
from trainers.fleet.search.optuna_search import SearchedJob

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
TPE, Random = optuna.samplers.TPESampler, optuna.samplers.RandomSampler
Float, Choice = (
    optuna.distributions.FloatDistribution,
    optuna.distributions.CategoricalDistribution,
)
SPACE = {"lr": Float(1e-3, 1.0, log=True), "wide": Choice([False, True])}
STATES = optuna.trial.TrialState


def make(params: Mapping[str, Any]) -> Any:
    """A program whose loss is best at lr 0.1, if it is wide."""
    loss = math.log10(params["lr"] / 0.1) ** 2 + (0.0 if params["wide"] else 0.3)
    return lambda seat: {10 * rung: loss + 1 / rung for rung in range(1, 5)}


def search_of(fleet: FakeFleet, sampler: Any = None, **options: Any) -> OptunaSearch:
    given = {"space": SPACE, "make": make, "trials": 12, "at_once": 3, **options}
    return OptunaSearch(fleet, sampler or TPE(seed=1, n_startup_trials=4), **given)


def kept(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "search.json").read_text(encoding="utf-8"))


def test_it_asks_as_often_as_it_should_and_so_many_jobs_are_there_at_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    search = search_of(fleet)
    result = search.fit()
    assert [*result.jobs] and set(result.jobs) == {f"trial-{n:04}" for n in range(12)}
    assert fleet.alive_at_most == 3
    assert {t.state for t in search.study.trials} == {STATES.COMPLETE}
    for trial in search.study.trials:
        job = result.jobs[f"trial-{trial.number:04}"]
        assert trial.value == job.metric
        assert trial.intermediate_values == result.history[job.name]
    assert kept(tmp_path) == {
        f"trial-{t.number:04}": json.loads(json.dumps(t.params)) for t in search.study.trials
    }


def test_one_job_at_a_time_asks_what_optunas_own_loop_asks(tmp_path: Path) -> None:
    search = search_of(Fleet(tmp_path), at_once=1)
    search.fit()
    study = optuna.create_study(study_name="fleet", sampler=TPE(seed=1, n_startup_trials=4))
    for _ in range(12):
        trial = study.ask(SPACE)
        curve = make(trial.params)(None)
        for step, value in curve.items():
            trial.report(value, step)
        study.tell(trial, curve[40])
    assert [t.params for t in search.study.trials] == [t.params for t in study.trials]


def test_a_space_may_be_a_function_whose_parameters_depend_on_each_other(tmp_path: Path) -> None:
    def space(trial: Any) -> None:
        if trial.suggest_categorical("wide", [False, True]):
            trial.suggest_float("lr", 0.01, 0.1)
        else:
            trial.suggest_float("lr", 1e-3, 1e-2)

    search = search_of(Fleet(tmp_path), space=space)
    search.fit()
    params = [t.params for t in search.study.trials]
    assert {p["wide"] for p in params} == {False, True}
    assert all((p["lr"] >= 0.01) == p["wide"] for p in params)


def by_length(journal: list[Any]) -> Any:
    return lambda living: sorted(living)[len(journal) % len(living)]


@pytest.mark.parametrize("killed_after", [0, 1, 9, 25])
@pytest.mark.parametrize(
    "sampler", [TPE(seed=1, n_startup_trials=4), Random(seed=2)], ids=["tpe", "random"]
)
def test_after_a_kill_the_same_trials_come_again(
    sampler: Any, killed_after: int, tmp_path: Path
) -> None:
    def fleet_of(folder: str, journal: list[Any]) -> Fleet:
        rule = OptunaPruner(optuna.pruners.MedianPruner(2), "val_loss", every=10)
        return Fleet(tmp_path / folder, rule=rule, journal=journal)

    def fit(fleet: Fleet) -> OptunaSearch:
        fleet.turns = by_length(fleet.journal)
        search = search_of(fleet, sampler, trials=8)
        search.fit()
        return search

    whole = fleet_of("whole", [])
    search = fit(whole)
    assert {"stopped", "finished"} == set(whole.gone.values())
    assert STATES.PRUNED in {t.state for t in search.study.trials}
    killed = fleet_of("killed", [])
    killed.kill_after = killed_after
    with pytest.raises(Killed):
        fit(killed)
    again = fleet_of("killed", list(killed.journal))
    after = fit(again)
    assert again.journal == whole.journal
    assert kept(tmp_path / "killed") == kept(tmp_path / "whole")
    for one, other in zip(after.study.trials, search.study.trials, strict=True):
        assert (one.params, one.state, one.value) == (other.params, other.state, other.value)


def test_another_seed_after_a_restart_is_refused_with_both_parameters(tmp_path: Path) -> None:
    search_of(Fleet(tmp_path), TPE(seed=1)).fit()
    with pytest.raises(FleetError, match=r"trial-0000 had the parameters .*before the restart"):
        search_of(Fleet(tmp_path), TPE(seed=2)).fit()


@pytest.mark.parametrize("text", [b"{", b"[]", b"3", b"null", b"[" * 100_000, b"\xff"])
def test_a_damaged_file_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "search.json").write_bytes(text)
    with pytest.raises(FleetError, match=r"search\.json is damaged"):
        search_of(Fleet(tmp_path)).fit()


def test_a_sampler_without_a_seed_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    with pytest.raises(FleetError, match=r"TPESampler has no seed.*TPESampler\(seed=0\)"):
        search_of(fleet, TPE()).fit()
    assert not fleet.added


def test_a_make_that_raises_fails_its_trial_and_the_others_go_on(tmp_path: Path) -> None:
    def sometimes(params: Mapping[str, Any]) -> Any:
        if not params["wide"]:
            raise ZeroDivisionError("narrow")
        return make(params)

    search = search_of(Fleet(tmp_path), make=sometimes)
    result = search.fit()
    assert len(result.jobs) == 12
    failed = [t for t in search.study.trials if t.state == STATES.FAIL]
    assert failed and len(failed) < 12
    assert all(not t.params["wide"] for t in failed)
    assert {t.user_attrs["why"] for t in failed} == {"ZeroDivisionError: narrow"}


@pytest.mark.parametrize(
    ("curve", "says"),
    [({}, "it never logged val_loss"), ({10: math.nan}, "its val_loss is NaN")],
    ids=["never", "nan"],
)
def test_a_job_without_a_number_is_a_failed_trial(
    curve: dict[int, float], says: str, tmp_path: Path
) -> None:
    search = search_of(Fleet(tmp_path), make=lambda params: lambda seat: curve)
    search.fit()
    assert {t.state for t in search.study.trials} == {STATES.FAIL}
    assert {t.user_attrs["why"] for t in search.study.trials} == {says}


def test_a_sampler_that_has_no_more_points_ends_the_search(tmp_path: Path) -> None:
    space = {"lr": Choice([0.1, 0.2]), "wide": Choice([False, True])}
    for number, sampler in enumerate(
        (
            optuna.samplers.GridSampler({"lr": [0.1, 0.2], "wide": [False, True]}, seed=0),
            optuna.samplers.BruteForceSampler(seed=0),
        )
    ):
        search = search_of(Fleet(tmp_path / str(number)), sampler, space=space, at_once=1)
        search.fit()
        points = {(t.params["lr"], t.params["wide"]) for t in search.study.trials}
        assert len(points) == len(search.study.trials) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"trials": 0}, "trials=0"),
        ({"trials": 2.0}, "trials=2.0"),
        ({"at_once": 0}, "at_once=0"),
        ({"sampler": "TPESampler"}, "'TPESampler' as its sampler"),
        ({"space": {}}, "empty space"),
        ({"make": {}}, "make={}"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=says):
        search_of(Fleet(tmp_path), **arguments)


def test_a_fleet_without_a_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"Fleet\(metric="):
        search_of(Fleet(tmp_path, metric=None)).fit()


def test_a_second_fit_and_a_study_before_the_first_are_refused(tmp_path: Path) -> None:
    search = search_of(Fleet(tmp_path))
    with pytest.raises(FleetError, match="call fit"):
        _ = search.study
    search.fit()
    with pytest.raises(FleetError, match="fitted already"):
        search.fit()


# ---- by names, for a configuration --------------------------------------------------------------

VALUES: dict[str, list[Any]] = {
    "lr": [0.1, 0.01],
    "betas": [[0.9, 0.99], [0.9, 0.95]],
    "flag": [1, True, None],
}


def named(fleet: FakeFleet, **options: Any) -> OptunaSearch:
    made = optuna_search_of(
        fleet,
        options.pop("values", VALUES),
        lambda params: lambda seat: {10: params["lr"] + params["betas"][1]},
        **{"sampler": "TPESampler", "trials": 6, "at_once": 2, "seed": 0, **options},
    )
    return made


def test_a_grid_sampler_trains_every_combination_once(tmp_path: Path) -> None:
    search = named(Fleet(tmp_path), sampler="GridSampler", trials=12)
    search.fit()
    points = {tuple(sorted(t.params.items(), key=str)).__repr__() for t in search.study.trials}
    assert len(points) == 12


def test_equal_values_of_two_types_are_two_choices(tmp_path: Path) -> None:
    seen: list[Any] = []

    def make(params: Mapping[str, Any]) -> Any:
        seen.append(params["flag"])
        return lambda seat: {10: 1.0}

    search = optuna_search_of(
        Fleet(tmp_path),
        {"flag": [1, True, None]},
        make,
        sampler="GridSampler",
        trials=3,
        at_once=1,
        seed=0,
    )
    search.fit()
    assert sorted({repr(value) for value in seen}) == ["1", "None", "True"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampler": "TPSampler"}, "no sampler 'TPSampler': did you mean TPESampler"),
        ({"sampler": "zzz"}, "known: .*TPESampler"),
        ({"sampler": "PartialFixedSampler"}, "cannot be made from a seed alone"),
        ({"trials": 13}, "13 trials are more than the 12 combinations"),
        ({"values": {"lr": [0.1, 0.2, 0.1]}, "trials": 1}, "lr has a value twice"),
        ({"values": {}}, "at least one value"),
        ({"values": {"lr": []}}, "at least one value"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused_by_name(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(FleetError, match=says):
        named(Fleet(tmp_path), **options)


def test_a_pruner_by_its_name() -> None:
    rule = optuna_pruner_of("MedianPruner", "val_loss", every=5)
    assert isinstance(rule.pruner, optuna.pruners.MedianPruner)
    with pytest.raises(FleetError, match="did you mean MedianPruner"):
        optuna_pruner_of("MeanPruner", "val_loss", every=5)
    with pytest.raises(FleetError, match="settings that must be given"):
        optuna_pruner_of("PercentilePruner", "val_loss", every=5)


@pytest.mark.parametrize("data", [b"\xff\0" * 999, b"text", b"SQLite format 3\0" + b"\0" * 2000])
def test_a_damaged_storage_is_refused_by_its_name(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "search.db").write_bytes(data)
    url = f"sqlite:///{tmp_path / 'search.db'}"
    search: dict[str, Any] = {"sampler": "TPESampler", "trials": 1, "at_once": 1, "seed": 3}
    with pytest.raises(FleetError, match=r"search\.db' cannot be used \(.*is not a database"):
        optuna_search_of(FakeFleet(tmp_path), VALUES, make, **search, storage=url).fit()


def test_a_job_is_made_in_its_own_turn_with_its_own_seed(tmp_path: Path) -> None:
    drawn: list[float] = []

    def draws(params: Mapping[str, Any]) -> Any:
        drawn.append(torch.rand(1).item())
        return lambda seat: None

    jobs = [SearchedJob(draws, {}, seed) for seed in (5, 6, 5)]
    assert not drawn
    for job in jobs:
        job(SimpleNamespace(name="a"))
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (7, "returned a int"),
        ({}, "a dict with nothing: module and train are needed"),
        ({"module": 1, "train": 2, "trian": 3}, "a dict with module, train, trian"),
    ],
    ids=str,
)
def test_what_make_returns_is_checked(made: Any, says: str) -> None:
    with pytest.raises(FleetError, match=says):
        SearchedJob(lambda params: made, {}, 0)(SimpleNamespace(name="a"))
