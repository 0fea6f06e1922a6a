"""A grid of runs: its axes, its points, and how a point becomes a configuration.

axes  optimizer.lr: [1e-3, 3e-4] x loader.batch_size: [16, 8]   ->   4 points, 4 configurations
"""

import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from perfect.config.grid_schema import FleetConfig
from perfect.config.key_paths import put
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
    """A grid of runs. With `fleet.search` it has no points of its own: `point_with` makes them."""

    axes: tuple[Axis, ...]
    fleet: FleetConfig
    base: Mapping[str, Any]
    """The run as it is written, without the values of the axes."""
    points: tuple[Point, ...]

    def point_with(self, values: Sequence[Any]) -> Point:
        """Return the point with these values, one of each axis."""
        config = RunConfig.model_validate(placed(self.base, self.axes, values))
        names = [axis.name for axis in self.axes]
        (name,) = unlike([point_name(names, values)])
        return Point(name, dict(zip(names, values, strict=True)), config)

    @property
    def first(self) -> Point:
        """The point with the first value of each axis."""
        return self.point_with([axis.values[0] for axis in self.axes])

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


# ---- names: readable, different from one another, and fit for a folder ---------------------------
#
#   {"optimizer.lr": 0.0003, "loader.batch_size": 16}   ->   lr=3e-4,batch_size=16

LONGEST_NAME = 120
"""A file system takes names of up to 255 bytes, and files beside a folder have longer ones."""
UNSAFE = re.compile(r"[^\w.=,+%-]", re.ASCII)


def key_names(keys: Sequence[str]) -> list[str]:
    """Return the short name of each key; a key may have several paths."""
    paths = [key.split(",")[0].strip().split(".") for key in keys]
    names = []
    for path in paths:
        ends = (".".join(path[-n:]) for n in range(1, len(path) + 1))
        whole = ".".join(path)
        names.append(next((end for end in ends if _owners(end, paths) == 1), whole))
    return names


def _owners(end: str, paths: Sequence[Sequence[str]]) -> int:
    return sum(f".{'.'.join(path)}".endswith(f".{end}") for path in paths)


def point_name(names: Sequence[str], values: Sequence[object]) -> str:
    pairs = zip(names, values, strict=True)
    return ",".join(f"{name}={value_text(value)}" for name, value in pairs)


def unlike(names: Sequence[str]) -> list[str]:
    """Return names for folders. Those that would be equal, or are too long, get a number."""
    made: list[str] = []
    for name in names:
        safe = UNSAFE.sub("_", name)[:LONGEST_NAME].lstrip(".") or "_"
        again = (f"{safe}-{number}" for number in itertools.count(2))
        made.append(safe if safe not in made else next(one for one in again if one not in made))
    return made


def value_text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list | tuple):
        return "-".join(map(value_text, value))
    if isinstance(value, Mapping):
        return "-".join(f"{key}={value_text(part)}" for key, part in value.items())
    return str(value)


def _number(value: float) -> str:
    """Return all digits of a number, as `3e-4` if that is shorter than `0.0003`."""
    plain = repr(value).removesuffix(".0")
    if not math.isfinite(value):
        return plain
    digits = next(text for n in range(18) if float(text := f"{value:.{n}e}") == value)
    mantissa, _, power = digits.partition("e")
    short = f"{mantissa}e{int(power)}"
    return min(plain, short, key=len)
