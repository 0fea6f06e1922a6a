"""A grid of runs: its axes, its points, and how a point becomes a configuration.

axes  optimizer.lr: [1e-3, 3e-4] x loader.batch_size: [16, 8]   ->   4 points, 4 configurations
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from perfect.config.grid_schema import FleetConfig
from perfect.config.key_paths import put
from perfect.config.point_names import point_name, unlike
from perfect.config.schema import RunConfig, dump_config


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """A key of `grid`: its paths get each of the values in turn."""

    key: str
    name: str
    values: tuple[Any, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return paths_of(self.key)


@final
@dataclass(frozen=True, slots=True)
class Point:
    """One combination of values."""

    name: str
    settings: Mapping[str, Any]
    """The value of each axis, by the axis's name."""
    config: RunConfig


@final
@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of runs. With `fleet.search` it has no points of its own: `at` makes them."""

    axes: tuple[Axis, ...]
    fleet: FleetConfig
    base: Mapping[str, Any]
    """The run as it is written, without the values of the axes."""
    points: tuple[Point, ...]

    def at(self, values: Sequence[Any]) -> Point:
        """Return the point with these values, one of each axis."""
        config = RunConfig.model_validate(placed(self.base, self.axes, values))
        names = [axis.name for axis in self.axes]
        (name,) = unlike([point_name(names, values)])
        return Point(name, dict(zip(names, values, strict=True)), config)

    @property
    def first(self) -> Point:
        """The point with the first value of each axis."""
        return self.at([axis.values[0] for axis in self.axes])

    def dump(self) -> dict[str, Any]:
        """Return the grid as plain data, complete: the run is that of the first point."""
        return {
            "grid": {axis.key: list(axis.values) for axis in self.axes},
            "fleet": self.fleet.model_dump(mode="json"),
            **dump_config(self.first.config),
        }


def length_of(config: RunConfig) -> int | None:
    """Return the steps of a run, if they are known without its data."""
    steps = [phase.steps for phase in config.phases]
    return None if None in steps else sum(step or 0 for step in steps)


def paths_of(key: str) -> tuple[str, ...]:
    return tuple(path.strip() for path in key.split(","))


def placed(base: Mapping[str, Any], axes: Sequence[Axis], values: Sequence[Any]) -> dict[str, Any]:
    """Return the run with a value of each axis."""
    data = copy.deepcopy(dict(base))
    for axis, value in zip(axes, values, strict=True):
        for path in axis.paths:
            put(data, path, value)
    return data
