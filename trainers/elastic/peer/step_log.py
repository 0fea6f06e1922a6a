"""The log of one peer: generations, and of each commit who added which lanes, with its digest.

    {"run": {"lanes": 64, "sum": "fast", ...}}
    {"begins": 120, "with": "checkpoint", "era": {"id": "6c1f", "number": 2, "after": ..., ...}}
    {"generation": 3, "members": ["a", "b"], "step": 120, "era": "6c1f"}
    {"gap": 0.31, "why": "b is gone: ...", "step": 120}
    {"commit": 120, "added": [["a", [0, 2]], ["b", [1, 3]]], "digest": "...",
     "peers": [["a", 16, 0.21, 90112], ["b", 16, 0.2, 90112]]}

`peers`: the samples of a member's lanes, how long it computed them, and the bytes of sums that it
had sent since it joined, before the reduce of this step.

Every line has the `time`, in seconds since 1970. A line is written before its commit is applied.

The logs of several peers together are one history: where they overlap they must agree. When no peer
has the state any more, one begins with its checkpoint, and the swarm repeats the steps after it:
earlier log lines of these steps are void. Each such life of a run is an era. A log without eras
counts as one era.

A peer whose disk is full trains on, and its log lacks lines: a replay then needs other peers' logs.
A peer does not begin without its `begins` line, because later lines depend on it.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from trainers.elastic.deciding.header import Header
from trainers.elastic.deciding.view import Added, View
from trainers.elastic.errors import LogDamaged
from trainers.elastic.work.digests import Commit
from trainers.plain_values import typed, with_defaults
from trainers.record_file import RecordFile, read_records

UNKNOWN = ""
"""The id of steps whose log names no era. They are taken for one era."""


@dataclass(frozen=True, slots=True)
class Era:
    """One life of a run."""

    id: str
    number: int
    """Higher than that of every era which was known to the peer that began this one."""
    after: str = UNKNOWN
    step: int = 0

    def plain(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: object) -> "Era":
        """Return the era that `plain` gave. Raise `ValueError` for anything else."""
        return typed(cls, with_defaults(cls, plain), "an era")


class TwoLives(ValueError):
    """Two lives of one run have the same number, so neither knows of the other."""


def steps_that_count(eras: Iterable[Era]) -> dict[str, float]:
    """Return up to which step (not included) each era's steps count; those of other eras do not
    count. Raise `TwoLives` if it is unknown which era was the last."""
    known = {era.id: era for era in eras}
    if not known:
        return {UNKNOWN: math.inf}
    newest = max(era.number for era in known.values())
    last, *others = sorted(
        (era for era in known.values() if era.number == newest), key=lambda era: era.id
    )
    if others:
        lives = " and ".join(f"{era.id} from step {era.step} on" for era in (last, *others))
        raise TwoLives(f"two lives of the run do not know of each other: {lives}")
    ends: dict[str, float] = {last.id: math.inf}
    era: Era | None = last
    until = math.inf
    while era is not None:
        until = min(until, era.step)
        ends[era.after] = until
        era = known.pop(era.after, None)
    return ends


Source = Literal["nothing", "checkpoint", "member"]
"""What a peer begins with: the first weights, a checkpoint of its own, or a member's state."""
FORMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "time": {"time": float},
        "run": {"run": {"lanes": int, "sum": str, "micro": int}},
        "begins": {"begins": int, "with": str},
        "generation": {"generation": int, "members": tuple[str, ...], "step": int},
        "gap": {"gap": float, "why": str, "step": int},
        "commit": {"commit": int, "added": Added, "digest": str},
        "peers": {"peers": tuple[tuple[str, int, float, int], ...]},
    }
)


class StepLog:
    """The log of one peer. It is appended to an existing file."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self._ahead = time.time() - time.monotonic()
        """Times never go back, also where the machine's clock is set back in a run."""
        self._path = path
        self._era = UNKNOWN
        with self._refuse_full_disk():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = RecordFile(path)
            self._file.append(self._timed({"run": dict(run)}))

    def begins(self, step: int, source: Source, era: Era) -> None:
        """Note with which state this peer begins, and of which life of the run it is."""
        self._era = era.id
        with self._refuse_full_disk():
            self._file.append(self._timed({"begins": step, "with": source, "era": era.plain()}))

    def generation(self, view: View, step: int) -> None:
        members = list(view.names)
        about = {"generation": view.generation, "members": members, "step": step, "era": self._era}
        self._write(about)

    def gap(self, why: str, seconds: float, step: int) -> None:
        """Note that a generation ended unplanned, and the seconds until the next one began."""
        self._write({"gap": round(seconds, 4), "why": why, "step": step})

    def commit(self, commit: Commit, headers: Sequence[Header] = ()) -> None:
        """Note a commit. `headers`: of all members; a newcomer that follows knows none."""
        added = [[name, list(lanes)] for name, lanes in commit.added]
        peers = [[h.name, h.logs.samples, h.pace.seconds, h.pace.sent] for h in headers]
        more = {"peers": peers} if peers else {}
        self._write({"commit": commit.step, "added": added, **more, "digest": commit.digest})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.append_if_it_fits(self._timed(line))

    def _timed(self, line: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**line, "time": round(self._ahead + time.monotonic(), 3)}

    @contextmanager
    def _refuse_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LogDamaged(
                f"{self._path} cannot be written ({error}): free some space, or begin this peer in"
                " another folder"
            ) from error

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class LoggedCommit:
    """A commit as a log has it."""

    step: int
    added: Added
    digest: str


@dataclass(frozen=True, slots=True)
class History:
    """The logs of a swarm, merged."""

    run: Mapping[str, Any]
    commits: Mapping[int, LoggedCommit]

    @property
    def steps(self) -> int:
        """The number of steps that are known without a gap, from the first one on."""
        step = 0
        while step in self.commits:
            step += 1
        return step


def read_history(paths: Sequence[Path]) -> History:
    """Merge the logs of one or several peers. Raise `LogDamaged` if they disagree."""
    runs: list[Mapping[str, Any]] = []
    lines = {path: read_lines(path) for path in paths}
    try:
        counts = steps_that_count(era for path in paths for era in _eras(lines[path]))
    except TwoLives as error:
        raise LogDamaged(f"{error}: give the logs of one of them") from error
    commits: dict[int, LoggedCommit] = {}
    for path in paths:
        era = UNKNOWN
        for number, line in enumerate(lines[path], start=1):
            if "run" in line:
                runs.append(line["run"])
            elif "begins" in line:
                era = line.get("era", {}).get("id", UNKNOWN)
            elif "commit" in line and line["commit"] < counts.get(era, 0):
                added = tuple((name, tuple(lanes)) for name, lanes in line["added"])
                commit = LoggedCommit(line["commit"], added, line["digest"])
                known = commits.setdefault(commit.step, commit)
                if known.digest != commit.digest:
                    raise LogDamaged(
                        f"{path}:{number}: step {commit.step} has digest {commit.digest} here and"
                        f" {known.digest} in another log: these are not logs of one run"
                    )
    if not runs:
        raise LogDamaged(f"no run is in {', '.join(map(str, paths)) or 'no log'}")
    if different := [run for run in runs if run != runs[0]]:
        raise LogDamaged(f"the logs are of two runs: {runs[0]} and {different[0]}")
    return History(runs[0], commits)


def newest_era(paths: Iterable[Path]) -> int:
    """Return the highest number of an era in these logs, or 0."""
    return max((era.number for path in paths for era in _eras(read_lines(path))), default=0)


def _eras(lines: Iterable[Mapping[str, Any]]) -> Iterable[Era]:
    return (Era.of_plain(line["era"]) for line in lines if "begins" in line and "era" in line)


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the lines of one log."""
    try:
        return read_records(path, _check)
    except ValueError as error:
        raise LogDamaged(
            f"{error}: move this file out of its folder; the logs of other peers may have its steps"
        ) from error


def _check(_number: int, line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a line. Raise `ValueError` if it is not as `StepLog` writes it."""
    for key, form in FORMS.items():
        if key in line or key == "time":
            typed(form, line, "it")
    if "begins" in line and "era" in line:
        Era.of_plain(line["era"])
    return line
