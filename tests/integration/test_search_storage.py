"""A search whose study is in a storage of Optuna's: a kill, a restart, a storage that is wrong."""

import math
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.fake_fleet import Killed
from support.fake_fleet import SearchedFleet as Fleet

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.search import OptunaSearch

optuna = pytest.importorskip("optuna")
Random = optuna.samplers.RandomSampler
SPACE = {"lr": optuna.distributions.FloatDistribution(1e-3, 1.0, log=True)}


def make(params: Mapping[str, Any]) -> Any:
    loss = math.log10(params["lr"] / 0.1) ** 2
    return lambda seat: {10 * rung: loss + 1 / rung for rung in range(1, 5)}


def search_of(fleet: Fleet, url: str, sampler: Any = None) -> OptunaSearch:
    given = {"trials": 8, "at_once": 3, "storage": url}
    return OptunaSearch(fleet, sampler or Random(seed=2), SPACE, make, **given)


@pytest.mark.parametrize("killed_after", [1, 17])
@pytest.mark.parametrize("sampler", [Random(seed=2), Random()], ids=["seed", "no seed"])
def test_a_stored_study_goes_on_after_a_kill_and_asks_nothing_twice(
    sampler: Any, killed_after: int, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/search.db"
    killed = Fleet(tmp_path / "fleet", kill_after=killed_after)
    with pytest.raises(Killed):
        search_of(killed, url, sampler).fit()
    before = optuna.load_study(study_name=str(killed.folder), storage=url).trials
    assert 3 <= len(before) < 8
    search = search_of(Fleet(killed.folder, journal=killed.journal), url, sampler)
    result = search.fit()
    after = optuna.load_study(study_name=str(killed.folder), storage=url).trials
    assert [t.params for t in after[: len(before)]] == [t.params for t in before]
    assert len({t.params["lr"] for t in after}) == len(after) == 8, "no numbers are drawn again"
    assert {t.state for t in after} == {optuna.trial.TrialState.COMPLETE}
    for trial in after:
        job = result.jobs[f"trial-{trial.number:04}"]
        assert trial.value == job.metric


def test_a_storage_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    for url in ("search.db", "sqlite:////no/such/folder/search.db", "nodb://me:secret@host/x"):
        with pytest.raises(FleetError, match=r"cannot be used .*give a URL such as") as error:
            search_of(Fleet(tmp_path), url).fit()
        assert "\n" not in str(error.value) and "secret" not in str(error.value)
    url = f"sqlite:///{tmp_path}/search.db"
    search_of(Fleet(tmp_path), url).fit()
    (tmp_path / "search.json").unlink()
    with pytest.raises(FleetError, match="with 8 trials, and the folder has none of their jobs"):
        search_of(Fleet(tmp_path), url).fit()


DAMAGES = {
    "parameters that are no JSON": "update trial_params set distribution_json='{'",
    "parameters that are a list": "update trial_params set distribution_json='[]'",
    "an unknown kind of parameters": """update trial_params
        set distribution_json='{"name": "X", "attributes": {}}'""",
    "an unknown state": "update trials set state='WHAT'",
    "a trial that waits": "update trials set state='WAITING'",
    "another number": "update trials set number=7",
    "a second aim": """insert into study_directions(direction, study_id, objective)
        select 'MINIMIZE', study_id, 1 from studies""",
    "no date": "update trials set datetime_start='x'",
    "no study": "delete from studies",
    "no parameters": "drop table trial_params",
    "an object that was pickled": """insert into trial_system_attributes(trial_id, key, value_json)
        select trial_id, 'cma:optimizer:0', '"80"' from trials""",
}


@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_a_storage_that_somebody_has_changed_is_refused(change: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/search.db"
    killed = Fleet(tmp_path / "fleet", kill_after=9)
    with pytest.raises(Killed):
        search_of(killed, url).fit()
    with closing(sqlite3.connect(tmp_path / "search.db")) as database:
        database.execute(change)
        database.commit()
    with pytest.raises(FleetError, match=r"cannot be used \(|may run code|before the restart"):
        search_of(Fleet(killed.folder, journal=killed.journal), url).fit()
