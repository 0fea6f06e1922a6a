"""A grid of runs: its axes, its points, and how a point becomes a configuration.

axes  optimizer.lr: [1e-3, 3e-4] x loader.batch_size: [16, 8]   ->   4 points, 4 configurations
"""

import copy
import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, final, get_args, get_origin

from pydantic import BaseModel

from offload.sizes import format_count
from perfect.config.grid_schema import FleetConfig, HalvingConfig
from perfect.config.schema import RunConfig, dump_config

Parts = tuple[str | int, ...]


MOST_DIGITS = 20
"""No list has as many entries as a number of more digits."""


def parts_of(path: str) -> Parts:
    return tuple(
        int(part) if part.isdecimal() and len(part) < MOST_DIGITS else part
        for part in path.split(".")
    )


def why_not(path: str, data: Mapping[str, Any], root: type[BaseModel] = RunConfig) -> str | None:
    """Return why no value can be put at this path of a run; None if one can. `data` is the run as
    it is written, which says how long its lists are."""
    here: list[Any] = [root]
    value: Any = data
    done: list[str] = []
    for part in parts_of(path):
        models = [kind for kind in here if _is_model(kind)]
        lists = [kind for kind in here if get_origin(kind) is list]
        if any(get_origin(kind) is dict for kind in here):
            return None  # the arguments of a user's class may have any key
        if isinstance(part, int) and lists:
            length = len(value) if isinstance(value, list) else 0
            if part >= length:
                place, there = ".".join(done), "entry" if length == 1 else "entries"
                return f"{place} has {length} {there}, counted from 0: give a smaller number"
            here, value = [m for kind in lists for m in _members(get_args(kind)[0])], value[part]
        else:
            holders = [m for model in models if part in model.model_fields
                     for m in _members(model.model_fields[str(part)].annotation)]  # fmt: skip
            if not holders:
                return _describe_unknown(path, done, models, leaves(root), bool(lists))
            here, value = holders, value.get(part) if isinstance(value, dict) else None
        done.append(str(part))
    if any(_is_model(m) for kind in here for m in (kind, *_inner(kind))):
        above = "".join("0." if part.isdecimal() else f"{part}." for part in path.split("."))
        inside = [leaf for leaf in leaves(root) if leaf.startswith(above)]
        inside.sort(key=lambda leaf: (len(leaf), leaf))
        return f"'{path}' holds other keys: give one of them, such as '{inside[0]}'"
    return None


def _describe_unknown(
    path: str, done: Sequence[str], models: Sequence[type[BaseModel]], keys: set[str], many: bool
) -> str:
    if many:
        place = ".".join(done)
        return f"unknown key '{path}'; {place} is a list: give a number, such as '{place}.0'"
    part, *rest = path.split(".")[len(done) :]
    known = [name for model in models for name in model.model_fields]
    near = difflib.get_close_matches(part, known, n=1)
    if near and part != near[0]:
        return f"unknown key '{path}'; did you mean '{'.'.join((*done, near[0], *rest))}'?"
    last = path.rpartition(".")[2]
    same = sorted(key for key in keys if key.rpartition(".")[2] == last)
    near = same or difflib.get_close_matches(path, sorted(keys), n=1)
    place = f"in {'.'.join(done)} known: " if done else "known: "
    hint = f"did you mean '{near[0]}'?" if near else f"{place}{', '.join(known) or 'none'}"
    return f"unknown key '{path}'; {hint}"


def leaves(model: type[BaseModel] = RunConfig, at: str = "") -> set[str]:
    """Return every path that holds a value; a list is shown by its first entry."""
    paths: set[str] = set()
    for name, field in model.model_fields.items():
        here = f"{at}{name}"
        kinds = list(_members(field.annotation))
        inner = [(here, kind) for kind in kinds if _is_model(kind)]
        inner += [(f"{here}.0", m) for kind in kinds for m in _inner(kind) if _is_model(m)]
        for place, kind in inner:
            paths |= leaves(kind, f"{place}.")
        if not inner:
            paths.add(here)
    return paths


def put(data: dict[str, Any], path: str, value: Any) -> None:  # Any: plain data of a YAML
    """Put a value at a path, and make the sections that are missing on the way."""
    here: dict[Any, Any] = data
    *way, last = parts_of(path)
    for part in way:
        # A list's places are there already; both kinds take what is put at one of them.
        if isinstance(here, dict) and not isinstance(here.get(part), dict | list):
            here[part] = {}
        here = here[part]
    here[last] = copy.deepcopy(value)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _inner(kind: Any) -> Iterator[Any]:
    """Yield what a list holds."""
    if get_origin(kind) is list:
        yield from _members(get_args(kind)[0])


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the kinds that a value may have."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


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


def why_too_late(stop: HalvingConfig | None, lengths: Sequence[int]) -> str | None:
    """Return why jobs of these lengths end before the first rung; None if they do not."""
    if stop is None or not lengths or stop.first < min(lengths):
        return None
    shortest = format_count(min(lengths), "step")
    why = f"is {stop.first}, but the shortest job has {shortest}, so it would never be judged"
    return f"{why}: lower it"


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
        made.append(safe if safe not in made else next(each for each in again if each not in made))
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
