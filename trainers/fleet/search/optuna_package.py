"""Optuna itself, which is imported only when somebody searches."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from trainers.fleet.deciding.fleet_error import FleetError

if TYPE_CHECKING:
    from optuna import Study, Trial
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
    """Return a trial that an earlier process asked for, so that this one can tell its end."""
    optuna = import_optuna()
    kept = optuna.storages.get_storage(storage)
    found = kept.get_study_id_from_name(study.study_name)
    return optuna.trial.Trial(study, kept.get_trial_id_from_study_id_trial_number(found, number))


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
