"""Lets Optuna choose the points of a grid, one after the other: `fleet.search` in a YAML."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfect.config.grid import Grid
from perfect.grids.grid_job import GridJob
from trainers.fleet import Fleet, FleetResult
from trainers.fleet.search import optuna_search_of
from trainers.fleet.search.asked_trials import AskedTrials


@dataclass(frozen=True, slots=True)
class MakeGridJob:
    """Makes the job of a point from a value of each key. It can be pickled."""

    grid: Grid

    def __call__(self, params: Mapping[str, Any]) -> GridJob:
        values = [params[axis.key] for axis in self.grid.axes]
        return GridJob(self.grid.at(values).config)


def fit_of(grid: Grid, fleet: Fleet) -> Callable[[], FleetResult]:
    """Return what trains the grid: the fleet, or a search that adds jobs to it."""
    search = grid.fleet.search
    if search is None:
        return fleet.fit
    return optuna_search_of(
        fleet,
        {axis.key: axis.values for axis in grid.axes},
        MakeGridJob(grid),
        sampler=search.sampler,
        trials=search.trials,
        at_once=search.at_once,
        seed=search.seed,
        storage=search.storage,
    ).fit


def settings_of(grid: Grid, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the value of each axis, by the names of jobs and axes."""
    if grid.fleet.search is None:
        return {point.name: dict(point.settings) for point in grid.points}
    names = {axis.key: axis.name for axis in grid.axes}
    return {
        job: {names.get(key, key): value for key, value in params.items()}
        for job, params in AskedTrials(folder).read().items()
    }
