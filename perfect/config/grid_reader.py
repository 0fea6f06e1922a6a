"""Reads a YAML of one run, or of a grid of runs, and reports all problems at once.

YAML -> grid: axes  --+--> probes: each value of each axis, the others at their first value
        fleet         |         problems go to the value that causes them, the rest to the run
        the run ------+--> points: every combination, each with a name and a RunConfig
"""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from perfect.config.conflicts import value_at
from perfect.config.grid import (
    Axis,
    Grid,
    Point,
    key_names,
    length_of,
    parts_of,
    paths_of,
    placed,
    point_name,
    put,
    unlike,
    why_not,
    why_too_late,
)
from perfect.config.grid_schema import FleetConfig, GridSections
from perfect.config.schema import RunConfig
from perfect.config.yaml_reader import (
    MOST_PROBLEMS,
    UNREADABLE,
    Document,
    Path_,
    Problem,
    Source,
    check_run,
    config_error,
    read_document,
    read_value,
    run_of,
    validated,
)

MOST_POINTS = 1000
ENOUGH = 10 * MOST_PROBLEMS
"""No more values are checked after so many problems: few of them are shown."""
OF_THE_FLEET = ("trainer.accelerator", "trainer.devices", "trainer.threads")
OVERRIDDEN = (
    ("optimizer.lr", "lr", "lr.lr"),
    ("optimizer.weight_decay", "weight_decay", "weight_decay"),
    ("loader.batch_size", "batch_size", "batch_size"),
)
"""A key of the run, the key of a phase that replaces it, and the place of its value."""


def read_recipe(path: Path, settings: Sequence[str] = ()) -> tuple[RunConfig | Grid, Source]:
    """Return what a file describes, with the values of --set, or raise ConfigError."""
    document = with_settings(read_document(path), settings)
    if not {"grid", "fleet"} & document.data.keys():
        return run_of(document)
    return _Reading(document).grid(), document.source


class _Reading:
    """One reading of a grid. It gathers problems, each with its place."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._base = {k: v for k, v in document.data.items() if k not in ("grid", "fleet")}
        self._problems: list[Problem] = []

    def grid(self) -> Grid:
        fleet = self._fleet()
        axes = self._axes()
        points: tuple[Point, ...] = ()
        all_run = fleet is not None and fleet.search is None
        if all_run and (count := math.prod(len(axis.values) for axis in axes)) > MOST_POINTS:
            why = f"has {count:,} points: give at most {MOST_POINTS:,}, or fleet.search to try some"
            self._add([(("grid",), why)])
        elif axes and not self._probe(axes) and not self._problems and all_run:
            points = self._points(axes)
        elif not axes:
            self._add(check_run(self._base, self._document.source)[1])
        if fleet is not None:
            self._add_conflicts(fleet, axes, points)
        if self._problems or self._document.problems or fleet is None:
            lines = dict.fromkeys(
                self._document.source.describe(*problem) for problem in self._problems
            )
            raise config_error([*self._document.problems, *lines])
        return Grid(axes, fleet, self._base, points)

    def _add(self, problems: Sequence[Problem]) -> None:
        self._problems += problems

    def _fleet(self) -> FleetConfig | None:
        given, source = self._document.data, self._document.source
        for name, other in (("grid", "fleet"), ("fleet", "grid")):
            if name not in given:
                why = f"has no effect without {name}: give {name}, or remove it"
                self._add([((other,), why)])
        if "fleet" not in given:
            return None
        sections, problems = validated(GridSections, {"grid": {}, "fleet": given["fleet"]}, source)
        self._add(problems)
        return None if sections is None else sections.fleet

    def _axes(self) -> tuple[Axis, ...]:
        given = self._document.data.get("grid")
        if given is None and "grid" not in self._document.data:
            return ()
        if not isinstance(given, dict) or not given:
            what = "has no keys" if given in ({}, None) else f"must have keys, not {given!r}"
            self._add([(("grid",), f"{what}: give lists of values, such as optimizer.lr: [1e-3]")])
            return ()
        seen: dict[str, str] = {}
        good = []
        for key, values in given.items():
            if len(self._problems) > MOST_PROBLEMS:
                break
            problems = [*self._key_problems(key, seen)]
            self._add([*problems, *_value_problems(key, values)])
            if not problems and isinstance(values, list) and values:
                good.append(key)
        names = key_names(good)
        return tuple(
            Axis(key, name, tuple(given[key])) for key, name in zip(good, names, strict=True)
        )

    def _key_problems(self, key: str, seen: dict[str, str]) -> Iterator[Problem]:
        for path in paths_of(key):
            reason = None
            if path in seen:
                twice = "twice in this key" if seen[path] == key else f"in '{seen[path]}', too"
                reason = f"'{path}' is {twice}: leave it out once"
            elif path in OF_THE_FLEET:
                reason = f"'{path}' is the same for all jobs of a fleet: give it outside grid"
            elif not path:
                reason = "a path is empty: give paths with commas between them"
            else:
                reason = why_not(path, self._base)
            seen.setdefault(path, key)
            if reason is not None:
                yield ("grid", key), reason

    def _probe(self, axes: tuple[Axis, ...]) -> bool:
        """Check each value of each axis. Return whether a problem was found."""
        source = _with_paths(self._document.source, axes)
        firsts = [axis.values[0] for axis in axes]
        probes: list[tuple[int, int, list[Problem]]] = []
        so_far = 0
        of_all = ((n, place) for n, axis in enumerate(axes) for place in range(len(axis.values)))
        for number, place in of_all:
            values = [*firsts[:number], axes[number].values[place], *firsts[number + 1 :]]
            data = placed(self._base, axes, values)
            problems = check_run(data, source)[1]
            probes.append((number, place, problems))
            if (so_far := so_far + len(problems)) > ENOUGH:
                break
        always = set.intersection(*({*problems} for _, _, problems in probes))
        of_the_run = [problem for problem in check_run(self._base, source)[1] if problem in always]
        self._add(of_the_run)
        for number, place, problems in probes:
            for path, reason in problems:
                if (path, reason) in of_the_run:
                    continue
                owner = _owner(path, axes)
                if owner is not None:
                    here: Path_ = ("grid", axes[owner].key, place if owner == number else 0)
                    self._add([(here, reason)])
                elif (path, reason) not in always:
                    here = ("grid", axes[number].key, place)
                    self._add([(here, f"{_text(path)}{reason}")])
                else:  # no value is without it
                    here = ("grid", axes[_nearest(path, axes)].key)
                    self._add([(here, f"{_text(path)}{reason}")])
        idle = [*self._find_overridden(axes)]
        self._add(idle)
        return bool(idle or any(problems for _, _, problems in probes))

    def _find_overridden(self, axes: tuple[Axis, ...]) -> Iterator[Problem]:
        """Yield axes whose values no phase uses."""
        data = placed(self._base, axes, [axis.values[0] for axis in axes])
        phases = data.get("phases")
        if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
            return
        for axis in axes:
            for path, key, value in OVERRIDDEN:
                if axis.paths == (path,) and all(phase.get(key) is not None for phase in phases):
                    paths = ", ".join((path, *(f"phases.{n}.{value}" for n in range(len(phases)))))
                    why = f"has no effect, as every phase has its own {key}: give '{paths}', whose"
                    yield ("grid", axis.key), f"{why} keys get the same value"

    def _points(self, axes: tuple[Axis, ...]) -> tuple[Point, ...]:
        source = _with_paths(self._document.source, axes)
        names = [axis.name for axis in axes]
        combinations = [*itertools.product(*(axis.values for axis in axes))]
        points: list[Point] = []
        folders = unlike([point_name(names, values) for values in combinations])
        for name, values in zip(folders, combinations, strict=True):
            config, problems = check_run(placed(self._base, axes, values), source)
            for path, reason in problems:
                at = ("grid",) if _is_set(path, axes) else path
                self._add([(at, f"in the point {name}: {reason}")])
            if config is None:
                continue
            same = next((point for point in points if point.config == config), None)
            if same is not None:
                self._add([(("grid",), f"{same.name} and {name} are the same run: remove one")])
            points.append(Point(name, dict(zip(names, values, strict=True)), config))
        return tuple(points)

    def _add_conflicts(
        self, fleet: FleetConfig, axes: tuple[Axis, ...], points: Sequence[Point]
    ) -> None:
        swept = {path: axis.key for axis in axes for path in axis.paths}

        def refuse(key: str, usual: object, why: str) -> None:
            if value_at(self._base, "offload", key) not in (None, usual):
                self._add([(("offload", key), why)])
            if f"offload.{key}" in swept:
                self._add([(("grid", swept[f"offload.{key}"]), why)])

        if fleet.budget is not None:
            refuse(
                "budget", None, "both fleet.budget and this limit a step's memory: give one of them"
            )
        if fleet.stop is not None and fleet.search is not None and fleet.search.pruner is not None:
            why = "both this and fleet.stop end jobs early: give one of them"
            self._add([(("fleet", "search", "pruner"), why)])
        if fleet.search is not None:
            refuse("devices", 1, "the jobs of a search have one device each: leave it out")
        devices = value_at(self._base, "trainer", "devices")
        if type(devices) is int and devices > 1:
            why = f"is {devices}, but the fleet chooses a job's devices: give offload.devices"
            self._add([(("trainer", "devices"), why)])
        if self._base.get("elastic") is not None:
            why = "the nodes of a swarm train one run, and a fleet trains many: remove elastic, or"
            self._add([(("elastic",), f"{why} grid and fleet")])
        lengths = [length for point in points if (length := length_of(point.config)) is not None]
        if why := why_too_late(fleet.stop, lengths):
            self._add([(("fleet", "stop", "first"), why)])


def _value_problems(key: str, values: Any) -> Iterator[Problem]:
    here: Path_ = ("grid", key)
    if not isinstance(values, list):
        yield here, f"must be a list of values, not {values!r}: give [{values}]"
        return
    if not values:
        yield here, "has no values: give at least one, or remove the key"
    for place, value in enumerate(values):
        if value == UNREADABLE:
            continue
        earlier = [n for n in range(place) if _same(values[n], value)]
        if earlier:
            first = values[earlier[0]]
            yield (*here, place), f"{value!r} is the same as {first!r} before it: remove one"


def _same(first: object, second: object) -> bool:
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def _owner(path: Path_, axes: Sequence[Axis]) -> int | None:
    """Return the axis that sets the key at this path, or one above it."""
    for number, axis in enumerate(axes):
        for keys in map(parts_of, axis.paths):
            if path[: len(keys)] == keys:
                return number
    return None


def _is_set(path: Path_, axes: Sequence[Axis]) -> bool:
    """Whether an axis sets the key at this path, one in it or one above it."""
    paths = [keys for axis in axes for keys in map(parts_of, axis.paths)]
    return any(all(a == b for a, b in zip(path, keys, strict=False)) for keys in paths)


def _text(path: Path_) -> str:
    return f"{'.'.join(map(str, path))}: " if path else ""


def _nearest(path: Path_, axes: Sequence[Axis]) -> int:
    """Return the axis that sets something in the same section, or else the first one."""
    tops = [{parts_of(path_of_axis)[0] for path_of_axis in axis.paths} for axis in axes]
    return next((n for n, top in enumerate(tops) if path and path[0] in top), 0)


def _with_paths(source: Source, axes: Sequence[Axis]) -> Source:
    """Return the source with the keys that a grid sets, so that a problem's place is found."""
    lines = dict(source.lines)
    for axis in axes:
        for keys in map(parts_of, axis.paths):
            for length in range(1, len(keys) + 1):
                lines.setdefault(keys[:length], source.lines[("grid", axis.key)])
    return Source(source.name, lines)


def with_settings(document: Document, settings: Sequence[str]) -> Document:
    """Return the document with each `KEY=VALUE` in it; problems are added to those it has."""
    data, lines = copy.deepcopy(document.data), dict(document.source.lines)
    problems = list(document.problems)
    for setting in settings:
        key, _, text = setting.partition("=")
        where = f"--set {setting}"
        why = _why_not_set(setting, data)
        try:
            value = read_value(text)
        except (yaml.YAMLError, ValueError) as error:
            why = why or f"'{text}' is not a value of YAML: {str(error).splitlines()[0]}"
            value = None
        if why is not None:
            problems.append(f"{where}: {why}")
            continue
        put(data, key, value)
        parts = parts_of(key)
        for length in range(1, len(parts)):
            lines.setdefault(parts[:length], where)
        lines[parts] = where
    return Document(Source(document.source.name, lines), data, tuple(problems))


def _why_not_set(setting: str, data: dict[str, Any]) -> str | None:
    """Return why the key cannot be set; None if it can."""
    key, equals, _ = setting.partition("=")
    if not equals:
        return "give a key and its value, such as loader.batch_size=64"
    grid = data.get("grid")
    for axis in grid if isinstance(grid, dict) else ():
        for swept in paths_of(str(axis)):
            if f"{swept}.".startswith(f"{key}.") or f"{key}.".startswith(f"{swept}."):
                return f"has no effect, as grid gives {swept} its values: change them in the file"
    section = key.partition(".")[0]
    if section == "grid":
        return "the keys of a grid hold dots: change them in the file"
    of_a_grid = section == "fleet" and "fleet" in data
    return why_not(key, data, GridSections) if of_a_grid else why_not(key, data)
