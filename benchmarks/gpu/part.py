"""What a part of the suite is: a module with a name, a claim, steps and a report.

    steps(smoke) -> Step(run="gpu.ceilings:links", cells=("links h2d", ...), minutes=1)
                       -> a process that yields (cell, row) as they are measured
    report(found) -> tables, asked numbers

A cell's name is what it is known by when a run goes on: unique in its part, and it says all that
makes it different from the others.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from benchmarks.harness.report import Report

Row = dict[str, Any]
"""Numbers and words that JSON can hold."""
Rows = Iterator[tuple[str, Row]]
"""What the function of a step is: cells, as they are there."""

MODULES: Mapping[str, str] = {
    "a": "benchmarks.gpu.ceilings",
    "b": "benchmarks.gpu.equality",
    "c": "benchmarks.gpu.peaks",
    "d": "benchmarks.gpu.speed",
    "e": "benchmarks.gpu.peers",
    "i": "benchmarks.gpu.fleet",
    "j": "benchmarks.gpu.sharing",
}


@dataclass(frozen=True, slots=True)
class Step:
    """What one process measures. It is begun only while there is time for it."""

    run: str
    """module:function(Job) -> Rows"""
    cells: tuple[str, ...]
    """In the order in which they come."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    minutes: float = 1.0
    """About as long as it takes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the process, where a library reads nothing else."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is asked for."""

    run: str
    cells: tuple[str, ...]
    """Those that are missing yet."""
    arguments: Mapping[str, Any]
    device: str
    smoke: bool
    work: str = ""
    """A folder that outlives the process: checkpoints, pictures that were made up."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is there so far."""

    rows: Mapping[str, Row]
    """Of the cells that came to an end."""
    problems: Mapping[str, str]
    """Why others did not."""
    missing: Sequence[str]
    device: str
    smoke: bool
    cells: Sequence[str] = ()
    """All of them, in order."""

    def number(self, cell: str, key: str) -> float | None:
        """None where there is none."""
        value = self.rows.get(cell, {}).get(key)
        return None if value is None else float(value)


class Part(Protocol):
    """A module."""

    NAME: str
    CLAIM: str

    def steps(self, smoke: bool) -> Sequence[Step]: ...

    def report(self, found: Found) -> Report: ...


def load(letter: str) -> Part:
    name = MODULES[letter]
    try:
        return cast(Part, importlib.import_module(name))
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"part {letter}: {error.name} is not installed (benchmarks/gpu/wheels.sh core)"
        ) from None
