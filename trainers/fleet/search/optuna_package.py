"""Optuna itself, which is imported only when somebody searches."""

from importlib.util import find_spec
from types import MappingProxyType, ModuleType

from trainers.fleet.deciding.fleet_error import FleetError

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
        raise FleetError(
            f"searching needs Optuna ({error}): pip install 'perfect-training[search]'"
        ) from error
    return optuna


def check_needs(decider: object) -> None:
    """Refuse a sampler or pruner at once whose own package is missing."""
    name = type(decider).__name__
    package = NEEDS.get(name)
    if package is not None and find_spec(package) is None:
        raise FleetError(f"{name} needs the package {package}: pip install {package}")
