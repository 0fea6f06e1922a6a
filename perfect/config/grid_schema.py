"""The schema of a grid's YAML: the sections `grid` and `fleet`, beside those of a run.

    grid: {"optimizer.lr, phases.0.lr.lr": [1e-3, 3e-4], loader.batch_size: [16, 8]}     4 points
    fleet: {budget: 8GiB, stop: {rule: halving, first: 500}}

A key of `grid` is the path of a key of the run, or several paths that get the same value. Every
combination of values is a point, and every point is a job. With `fleet.search` the values are the
choices of a sampler instead, and its trials are the jobs.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from perfect.config.fields import Budget, Count, Flag, Rate, Section, Size, no_effect

Mode = Literal["min", "max"]


def _devices(given: object) -> object:
    numbers = given if isinstance(given, list) else []
    whole = all(type(number) is int and number >= 0 for number in numbers)
    if given == "auto" or (type(given) is int and given >= 1) or (numbers and whole):
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"{given} names a device twice: leave one out")
        return given
    raise ValueError(f"must be auto, a number of devices or a list of their numbers, not {given!r}")


Devices = Annotated[str | int | list[int], BeforeValidator(_devices)]


class HalvingConfig(Section):
    """Successive halving: at the steps first, first * eta, first * eta^2, ... the best 1/eta of the
    jobs go on, and the others stop."""

    rule: Literal["halving"]  # The only rule that there is.
    metric: str | None = None
    """None: what the fleet compares jobs by."""
    mode: Mode | None = None  # None: that of the fleet.
    eta: Annotated[int, Field(strict=True, ge=2)] = 3  # The best 1/eta of the jobs go on.
    first: Count  # The step of the first comparison.


class SearchConfig(Section):
    """Which points are tried is decided by Optuna, from the values in `grid`."""

    sampler: str = "TPESampler"
    """A class of optuna.samplers, by its name."""
    pruner: str | None = None
    """A class of optuna.pruners, which stops jobs early."""
    every: Count | None = None
    """The pruner looks at a job after each so many steps."""
    trials: Count  # So many points are tried in all.
    at_once: Count = 4
    """So many jobs are in the fleet at the same time."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = 0  # The seed of Optuna's draws.
    storage: str | None = None
    """Optuna keeps its study at this URL, such as sqlite:///search.db (None: nowhere)."""

    @model_validator(mode="after")
    def _check_pruner(self) -> "SearchConfig":
        if self.pruner is not None and self.every is None:
            raise ValueError(f"{self.pruner} needs every, the steps between two looks at a job")
        if self.pruner is None and self.every is not None:
            raise ValueError(no_effect({"every"}, "without pruner"))
        return self


class FleetConfig(Section):
    devices: Devices = "auto"
    """auto: every GPU that there is, or the CPU as one device."""
    budget: Budget | None = None
    """The bytes of each device that a step may take; the jobs take turns in them."""
    host_budget: Size | None = None
    """The bytes of host memory that all jobs together may take (None: what is free)."""
    quantum: Count | None = None
    """A job's turn has so many optimizer steps (None: 50 times as long as changing jobs takes)."""
    hours: Rate | None = None
    """The grid ends after so long with what is best by then, and the same command goes on for as
    long again (None: when all jobs have ended)."""
    migrate: Flag = True
    """Whether jobs with a range of devices move onto those that fall free."""
    metric: str = "val_loss"
    """Jobs are compared by the last value of this that they logged."""
    mode: Mode = "min"  # Whether a small or a large value is better.
    stop: HalvingConfig | None = None
    """None: every job trains to its end."""
    search: SearchConfig | None = None  # Optuna chooses the points (None: all are jobs).


class GridSections(Section):
    """What a grid's YAML has beside a run's sections."""

    grid: dict[str, Any]
    fleet: FleetConfig
