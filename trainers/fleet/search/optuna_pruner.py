"""A stop rule for which any pruner of Optuna decides.

    judge(seen, gone)    what is new in them since the call before
      |  ends            study.tell(trial, value, COMPLETE | PRUNED | FAIL)
      |  values          trial.report(value, step), trial.should_prune()
      v
    the jobs that the pruner gave up

The rule keeps a study in memory, and adds to it what is new at every call. A journal that is read
again makes the same calls in the same order, so a pruner without randomness decides the same again.
If a call has less than the one before, a journal is being read from its beginning, and the rule
begins anew, too.

How far a decision depends on which job was faster is up to the pruner:

    ThresholdPruner, NopPruner, PatientPruner(None)      not at all: they look at one job
    MedianPruner, PercentilePruner, WilcoxonPruner       on which jobs have finished by then
    SuccessiveHalvingPruner, HyperbandPruner             on which jobs have passed a rung by then

A fleet keeps its jobs level, so of jobs that begin together none has finished while a pruner of the
second kind could still stop another. Such a pruner needs jobs that begin one after the other
(`OptunaSearch(at_once=...)`). `Halving` waits for all jobs at a rung and depends on no speed.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from trainers.fleet.deciding.events import FleetError

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.storages import BaseStorage

NEEDS = MappingProxyType(
    {
        "CmaEsSampler": "cmaes",
        "GPSampler": "scipy",
        "QMCSampler": "scipy",
        "WilcoxonPruner": "scipy",
    }
)
"""What some classes import only when they decide for the first time, which may be after hours."""


def import_optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise FleetError(f"searching needs Optuna ({error}): pip install '.[search]'") from error
    return optuna


def stored_study(storage: "str | BaseStorage", name: str, **options: Any) -> "Study":
    """Return the study of this name as its storage has it, or a new one there."""
    with damage_of(storage):
        study = study_in_memory(storage=storage, study_name=name, load_if_exists=True, **options)
        keys = {key for trial in study.get_trials(deepcopy=False) for key in trial.system_attrs}
    if any("optimizer:" in key for key in keys):  # CmaEsSampler's: it would unpickle them
        raise FleetError(
            "the storage has pickled objects of an earlier CmaEsSampler, and loading them may run"
            " code: give another folder, and no storage to go on with this sampler after a restart"
        )
    return study


@contextmanager
def damage_of(storage: "str | BaseStorage | None") -> Iterator[None]:
    """Turn what is raised by a storage that is damaged or no storage into a `FleetError`."""
    try:
        yield
    except Exception as error:  # SQLAlchemy's, Optuna's, or that of a driver
        if storage is None:
            raise
        url = re.sub(r"//[^/@]*@", "//...@", str(storage))  # without a password
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise FleetError(
            f"storage={url!r} cannot be used ({why}): give a URL such as sqlite:///search.db"
        ) from error


def stored_trial(study: "Study", storage: "str | BaseStorage", number: int) -> "Trial":
    """Return a trial that an earlier process began, so that this process can report its end."""
    optuna = import_optuna()
    kept = optuna.storages.get_storage(storage)
    study_id = kept.get_study_id_from_name(study.study_name)
    return optuna.trial.Trial(study, kept.get_trial_id_from_study_id_trial_number(study_id, number))


def study_in_memory(**options: Any) -> "Study":
    """Return a new study. Optuna would write a line about it to the user's terminal."""
    optuna = import_optuna()
    options = {"study_name": "fleet", **options}  # Hyperband goes by its name
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(**options)
    finally:
        optuna.logging.set_verbosity(verbosity)


def check_needs(decider: object) -> None:
    """Refuse a sampler or pruner at once whose own package is missing."""
    name = type(decider).__name__
    package = NEEDS.get(name)
    if package is not None and find_spec(package) is None:
        raise FleetError(f"{name} needs the package {package}: pip install {package}")


Seen = Mapping[str, Mapping[int, float]]


class OptunaPruner:
    """Stops the jobs that `pruner` prunes. It looks at every job each `every` optimizer steps."""

    def __init__(
        self,
        pruner: "BasePruner",
        metric: str,
        *,
        every: int,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        optuna = import_optuna()
        if not isinstance(pruner, optuna.pruners.BasePruner):
            raise FleetError(
                f"OptunaPruner was given {pruner!r} as its pruner: give one of Optuna's, such as"
                " optuna.pruners.MedianPruner()"
            )
        check_needs(pruner)
        if not isinstance(metric, str) or not metric:
            raise FleetError(
                f"OptunaPruner was given metric={metric!r}: name what the jobs log and the pruner"
                ' compares, such as metric="val_loss"'
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise FleetError(
                f"OptunaPruner was given every={every!r}: give a number of optimizer steps"
            )
        if mode not in ("min", "max"):
            raise FleetError(f"OptunaPruner was given mode={mode!r}: give 'min' or 'max'")
        self.metric = metric
        self.every = every
        self.mode: Literal["min", "max"] = mode
        self.pruner = pruner
        self._study: FleetStudy | None = None

    def __repr__(self) -> str:
        """The whole rule: a journal keeps this text, and no fleet resumes it with another one."""
        return (
            f"OptunaPruner({_describe_pruner(self.pruner)}, {self.metric!r}, every={self.every},"
            f" mode={self.mode!r})"
        )

    def next_look(self, step: int) -> int | None:
        return (step // self.every + 1) * self.every

    def waits(self, job: str, seen: Seen, alive: object) -> bool:
        """No job waits for another one: Optuna's pruners decide with what there is."""
        return False

    def judge(self, seen: Seen, gone: Mapping[str, str]) -> Mapping[str, str]:
        """Return the jobs to stop, each with the reason. `seen` has every job in the order in which
        they were added; `gone` says of a job that has ended what it is: finished, stopped or
        failed."""
        if self._study is None or not self._study.is_known_to(seen, gone):
            self._study = FleetStudy(copy.deepcopy(self.pruner), self.metric, self.mode)
        self._study.update(seen, gone)
        return {job: why for job, why in self._study.pruned.items() if job not in gone}


class FleetStudy:
    """A study in memory, and what it knows of a fleet."""

    def __init__(self, pruner: "BasePruner", metric: str, mode: str) -> None:
        optuna = import_optuna()
        self._states = optuna.trial.TrialState
        self._study: Study = study_in_memory(
            direction="maximize" if mode == "max" else "minimize",
            sampler=optuna.samplers.RandomSampler(seed=0),  # nobody asks for parameters
            pruner=pruner,
        )
        self._metric = metric
        self._trials: dict[str, Trial] = {}
        self._values: dict[str, dict[int, float]] = {}
        self._gone: set[str] = set()
        self.pruned: dict[str, str] = {}

    def is_known_to(self, seen: Seen, gone: Mapping[str, str]) -> bool:
        """Whether these contain all that the study knows."""
        return self._gone <= gone.keys() and all(
            values.keys() <= seen.get(job, {}).keys() for job, values in self._values.items()
        )

    def update(self, seen: Seen, gone: Mapping[str, str]) -> None:
        for job in seen:
            if job not in self._trials:
                self._trials[job] = self._study.ask()
                self._values[job] = {}
        # Ends come first: a job has ended before the others' new values came.
        for job in [job for job in seen if job in gone and job not in self._gone]:
            self._report(job, seen[job])
            self._end(job, gone[job])
        for step, job in self._new(seen):
            self._report(job, {step: seen[job][step]})

    def _new(self, seen: Seen) -> list[tuple[int, str]]:
        """Return (step, job) of every new value, by its step and then in the order of the jobs."""
        new = [
            (step, position, job)
            for position, (job, values) in enumerate(seen.items())
            if job not in self._gone
            for step in values.keys() - self._values[job].keys()
        ]
        return [(step, job) for step, _, job in sorted(new)]

    def _report(self, job: str, values: Mapping[int, float]) -> None:
        trial = self._trials[job]
        for step in sorted(values.keys() - self._values[job].keys()):
            self._values[job][step] = values[step]
            if job in self.pruned:
                continue
            trial.report(values[step], step)
            if trial.should_prune():
                name = type(self._study.pruner).__name__
                self.pruned[job] = (
                    f"{name} pruned it at step {step} with {self._metric} {values[step]:.6g}"
                )
                self._study.tell(trial, state=self._states.PRUNED)

    def _end(self, job: str, phase: str) -> None:
        self._gone.add(job)
        if job in self.pruned:
            return
        values = self._values[job]
        last = values[max(values)] if values else math.nan
        if phase == "finished" and not math.isnan(last):
            self._study.tell(self._trials[job], last)
        elif phase == "stopped":
            self._study.tell(self._trials[job], state=self._states.PRUNED)
        else:
            self._study.tell(self._trials[job], state=self._states.FAIL)


def _describe_pruner(pruner: object) -> str:
    """Return a pruner's class and its settings, which its own `repr` lacks. A setting that is no
    plain value and no pruner is left out, because its text may contain an address."""
    settings = []
    for name, value in sorted(vars(pruner).items()):
        if isinstance(value, import_optuna().pruners.BasePruner):
            settings.append(f"{name.lstrip('_')}={_describe_pruner(value)}")
        elif isinstance(value, bool | int | float | str | None):
            settings.append(f"{name.lstrip('_')}={value!r}")
    return f"{type(pruner).__name__}({', '.join(settings)})"
