"""Optuna itself, which is imported only when somebody searches."""

from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from trainers.fleet.deciding.fleet_error import FleetError

if TYPE_CHECKING:
    from optuna import Study

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


def study_in_memory(**options: Any) -> "Study":
    """Return a new study. Optuna would write a line about it to the user's terminal."""
    optuna = import_optuna()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(study_name="fleet", **options)  # Hyperband goes by its name
    finally:
        optuna.logging.set_verbosity(verbosity)


def check_needs(decider: object) -> None:
    """Refuse a sampler or pruner at once whose own package is missing."""
    name = type(decider).__name__
    package = NEEDS.get(name)
    if package is not None and find_spec(package) is None:
        raise FleetError(f"{name} needs the package {package}: pip install {package}")
