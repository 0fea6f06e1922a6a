"""Ray itself, which is imported only when somebody uses it."""

from typing import Any

from trainers.fleet.deciding.fleet_error import FleetError

# Ray is too large to be there for everybody's type checker.
Ray = Any
Actor = Any


def import_ray() -> Ray:
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise FleetError(
            f"a fleet on several nodes needs Ray ({error}): pip install '.[ray]'"
        ) from error
    return ray


def import_tune() -> Any:
    import_ray()
    try:
        from ray import tune  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise FleetError(f"a trial needs Ray Tune ({error}): pip install '.[ray]'") from error
    return tune
