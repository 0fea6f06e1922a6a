"""A sampler of Optuna chooses the parameters of the next job, whenever a job has ended.

    begin        ask ask ask ask        at_once jobs are added
    a job ends   tell ask               the sampler knows its value, and the next job is added
    ...
    restarted    the same asks and tells, in the order of the fleet's journal; then it goes on

Without `storage` nothing of Optuna is kept on a disk: the answers of a sampler with a seed follow
from what it was told, and in which order. `AskedTrials` checks that they do. With it, a search
goes on with the trials that the storage has, and asks only for new ones.
"""

import copy
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.fleet import Fleet
from trainers.fleet.jobs.lightning_job import LightningJob, check_arguments
from trainers.fleet.jobs.seat import JobProgram, Seat
from trainers.fleet.keeping.fleet_result import FleetResult, JobResult
from trainers.fleet.search.optuna_pruner import (
    check_needs,
    damage_of,
    import_optuna,
    stored_study,
    stored_trial,
    study_in_memory,
)
from trainers.plain_values import typed
from trainers.record_file import parse_object

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

SEARCH_FILE = "search.json"


class AskedTrials:
    """The parameters of each job, by its name."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SEARCH_FILE
        self._asked: dict[str, dict[str, Any]] | None = None

    def exist(self) -> bool:
        """Whether a search has begun in this folder."""
        return self._path.exists()

    def note(self, job: str, params: Mapping[str, Any]) -> None:
        """Keep the parameters of a job. Raise `FleetError` if it had others before a restart."""
        if self._asked is None:
            self._asked = self.read()
        now = json.loads(json.dumps(dict(params)))
        before = self._asked.setdefault(job, now)
        if before != now:
            raise FleetError(
                f"{job} had the parameters {before} before the restart, and is asked to have {now}"
                f" now ({self._path}): give the sampler, its seed and the space that it had before,"
                " or another folder"
            )
        self._write(self._asked)

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of all jobs. Raise `FleetError` if their file is damaged."""
        if not self._path.exists():
            return {}
        try:
            asked = parse_object(self._path.read_text(encoding="utf-8"))
            return typed(dict[str, dict[str, Any]], asked, "it")
        except (OSError, ValueError) as error:
            raise FleetError(
                f"{self._path} is damaged ({error}): delete the fleet's folder to begin anew"
            ) from error

    def _write(self, asked: Mapping[str, Any]) -> None:
        """Replace the file as a whole, so that a kill leaves the old one or the new one."""
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("w", encoding="utf-8") as file:
                json.dump(asked, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            raise FleetError(
                f"{self._path} could not be written ({error}): free some space; the same program"
                " then goes on"
            ) from error


Make = Callable[[Mapping[str, Any]], Mapping[str, Any] | JobProgram]
"""From parameters to the arguments of `Fleet.add` (module=, train=, ...), or to a program."""
ARGUMENTS = ("module", "train", "val", "trainer", "offload", "seed", "reserve")


class OptunaSearch:
    """`trials` jobs, of which up to `at_once` are in the fleet at the same time."""

    def __init__(
        self,
        fleet: Fleet,
        sampler: "BaseSampler",
        space: "Mapping[str, BaseDistribution] | Callable[[Trial], object]",
        make: Make,
        *,
        trials: int = 20,
        at_once: int = 4,
        seed: int = 0,
        storage: "str | BaseStorage | None" = None,
    ) -> None:
        """`space`: Optuna's distributions by the name of the parameter, or a function that calls
        `trial.suggest_...`. `make(params)` returns the arguments of `Fleet.add` as a dict, or a
        program; it is called in the job's own turn. Each job is seeded with `seed` plus its
        number. `storage`: Optuna's, or its URL (sqlite:///search.db); the study there has the name
        of the fleet's folder."""
        optuna = import_optuna()
        if not isinstance(sampler, optuna.samplers.BaseSampler):
            raise FleetError(
                f"OptunaSearch was given {sampler!r} as its sampler: give one of Optuna's, such as"
                " optuna.samplers.TPESampler(seed=0)"
            )
        check_needs(sampler)
        for name, value in (("trials", trials), ("at_once", at_once)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FleetError(
                    f"OptunaSearch was given {name}={value!r}: give a whole number from 1 on"
                )
        if not callable(space) and not space:
            raise FleetError("OptunaSearch was given an empty space: name a parameter to search")
        if not callable(make):
            raise FleetError(
                f"OptunaSearch was given make={make!r}: give a function from parameters to a job"
            )
        self._fleet = fleet
        self._sampler = sampler
        self._space = space
        self._make = make
        self._storage = storage
        self._trials, self._at_once, self._seed = trials, at_once, seed
        self._study: Study | None = None
        self._asked: dict[str, Trial | None] = {}
        """By job. None: the storage has its end."""
        self._kept = AskedTrials(fleet.folder)
        self._exhausted = False

    @property
    def study(self) -> "Study":
        """Return what the sampler was told: parameters and values, for Optuna's own pictures."""
        if self._study is None:
            raise FleetError("the search has no study yet: call fit() first")
        return self._study

    def fit(self) -> FleetResult:
        """Train all jobs. Call it once; after a restart, make the fleet and the search again."""
        if self._study is not None:
            raise FleetError(
                "this search has been fitted already: make the fleet and the search again, with the"
                " same folder to go on or another one to begin anew"
            )
        if self._fleet.metric is None:
            raise FleetError(
                "a search compares its jobs by a metric, and the fleet watches none: give"
                ' Fleet(metric="val_loss")'
            )
        if self._storage is None:
            self._check_seeded()
            self._study = self._new_study(self._sampler)
        else:
            self._study = self._stored_study(self._storage)
        self._study.stop = self._no_more
        self._fleet.on_end(self._on_end)
        for _ in range(self._at_once):
            self._add_next()
        return self._fleet.fit()

    def _new_study(self, sampler: "BaseSampler") -> "Study":
        return study_in_memory(
            direction="maximize" if self._fleet.mode == "max" else "minimize",
            sampler=copy.deepcopy(sampler),
        )

    def _stored_study(self, storage: "str | BaseStorage") -> "Study":
        direction = "maximize" if self._fleet.mode == "max" else "minimize"
        sampler, name = copy.deepcopy(self._sampler), str(self._fleet.folder)
        study = stored_study(storage, name, direction=direction, sampler=sampler)
        if (known := len(study.get_trials(deepcopy=False))) and not self._kept.exist():
            raise FleetError(
                f"the storage has a study {name!r} with {known} trials, and the folder has none of"
                " their jobs: delete that study, or give another folder"
            )
        drawn = study_in_memory(direction=direction, sampler=sampler)
        for _ in range(known):  # else a sampler with a seed would draw the same numbers again
            self._suggest(drawn)
        return study

    def _no_more(self) -> None:
        """Take the place of `Study.stop`, which works inside of `Study.optimize` alone."""
        self._exhausted = True

    def _check_seeded(self) -> None:
        """Refuse a sampler without a seed: after a restart it would ask for other jobs."""
        first, second = (self._suggest(self._new_study(self._sampler)).params for _ in range(2))
        if first != second:
            raise FleetError(
                f"{type(self._sampler).__name__} has no seed, so it would ask for other jobs after"
                f" a restart: give optuna.samplers.{type(self._sampler).__name__}(seed=0)"
            )

    def _suggest(self, study: "Study") -> "Trial":
        if callable(self._space):
            trial = study.ask()
            self._space(trial)
            return trial
        return study.ask(dict(self._space))

    def _add_next(self) -> None:
        number = len(self._asked)
        if number == self._trials or self._exhausted:
            return
        trial, params = self._trial(number)
        job = f"trial-{number:04}"
        self._kept.note(job, params)
        self._asked[job] = trial
        self._fleet.add_program(job, SearchedJob(self._make, params, self._seed + number))

    def _trial(self, number: int) -> "tuple[Trial | None, Mapping[str, Any]]":
        """Return the next trial, None if it has ended already, and its parameters."""
        with damage_of(self._storage):
            known = self.study.get_trials(deepcopy=False)
            if number < len(known) and known[number].state.is_finished():
                return None, known[number].params
            if number < len(known):
                assert self._storage is not None, "only a storage has trials of an earlier process"
                trial = stored_trial(self.study, self._storage, number)
                return trial, trial.params
        trial = self._suggest(self.study)
        return trial, trial.params

    def _on_end(self, result: JobResult, seen: Mapping[int, float]) -> None:
        if result.name not in self._asked:
            return  # the user has added it
        if (trial := self._asked[result.name]) is not None:
            with damage_of(self._storage):
                self._report_end(trial, result, seen)
        self._add_next()

    def _report_end(self, trial: "Trial", result: JobResult, seen: Mapping[int, float]) -> None:
        for step, value in sorted(seen.items()):
            trial.report(value, step)
        why, value = result.why or f"it never logged {self._fleet.metric}", result.metric
        if result.state == "finished" and value is not None:
            if not math.isnan(value):
                self.study.tell(trial, value)
                return
            why = f"its {self._fleet.metric} is NaN"  # Optuna takes none as a value
        elif result.state == "stopped":
            self.study.tell(trial, state=import_optuna().trial.TrialState.PRUNED)
            return
        trial.set_user_attr("why", why)
        self.study.tell(trial, state=import_optuna().trial.TrialState.FAIL)


@dataclass(frozen=True, slots=True, eq=False)
class SearchedJob:
    """Calls `make` in the job's own turn, so that a job whose making fails is a job that failed,
    and what it draws is drawn with the job's own seed."""

    make: Make
    params: Mapping[str, Any]
    seed: int

    def __call__(self, seat: Seat) -> None:
        L.seed_everything(self.seed, verbose=False)
        made = self.make(dict(self.params))
        program = self._lightning_job(made, seat) if isinstance(made, Mapping) else made
        if not callable(program):
            raise FleetError(
                f"`make` returned a {type(made).__name__} for {dict(self.params)}: return a dict"
                f" with {', '.join(ARGUMENTS)} as for Fleet.add, or a program"
            )
        program(seat)

    def _lightning_job(self, made: Mapping[str, Any], seat: Seat) -> LightningJob:
        check_arguments(made, ARGUMENTS)
        given = {**dict.fromkeys(ARGUMENTS), "seed": self.seed, **made}
        job = LightningJob(**{**given, "trainer": dict(given["trainer"] or {})})
        job.check(seat.name, seat.device)
        return job
