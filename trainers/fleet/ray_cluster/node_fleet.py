"""What runs on a node: one fleet after the other, each with the jobs that were dealt to the node.

    folder/run-3fa2/node-0-1/jobs/a      the first fleet of node 0
    folder/run-3fa2/node-1-2/jobs/a      job a again: node 0 has died, and now node 1 has the job

A job goes on from the newest checkpoint of its own below `folder`. Where nodes do not share the
folder there is none, and the job begins anew.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.fleet import Fleet
from trainers.fleet.jobs.job_turns import LAST
from trainers.fleet.keeping.fleet_result import JobResult

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


JOBS = "jobs"
"""A fleet keeps its jobs below this name."""


@dataclass(frozen=True, slots=True, eq=False)
class DealtJob:
    """A job for any node."""

    name: str
    add: Callable[[Fleet], None]
    work: float


class Gatherer:
    """An actor on the caller's node. What it was told outlives the node that told it."""

    def __init__(self) -> None:
        self._ends: list[tuple[JobResult, Mapping[int, float]]] = []
        """The end of each job, and its metric by its step."""
        self._notes: dict[str, str] = {}

    def note(self, notes: Mapping[str, str]) -> None:
        self._notes.update(notes)

    def add(self, result: JobResult, history: Mapping[int, float]) -> None:
        self._ends.append((result, history))

    def gathered(self) -> tuple[list[tuple[JobResult, Mapping[int, float]]], dict[str, str]]:
        return self._ends, self._notes


class NodeFleet:
    """An actor on each node, which has all devices of the node."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any], gatherer: Actor) -> None:
        self._folder = folder
        self._arguments = arguments
        self._gatherer = gatherer

    def ready(self) -> None:
        """Return as soon as the node has room for this actor."""

    def run(self, name: str, jobs: list[DealtJob], again: bool) -> None:
        """Train jobs to their ends. `again`: another node had them before."""
        ray = import_ray()
        folder = self._folder / name  # `name` is new: nobody has written there
        notes = {job.name: taken_over(self._folder, folder, job.name, again) for job in jobs}
        ray.get(self._gatherer.note.remote({k: v for k, v in notes.items() if v}))
        fleet = Fleet(folder=folder, **self._arguments)
        for job in jobs:
            job.add(fleet)

        def ended(result: JobResult, _: Mapping[int, float]) -> None:
            history = fleet.result().history.get(result.name, {})
            ray.get(self._gatherer.add.remote(result, history))

        fleet.on_end(ended)
        fleet.fit()


def taken_over(root: Path, own: Path, job: str, again: bool) -> str:
    """Copy the newest checkpoint of a job into its new folder. Return where the job begins."""
    found = list(root.glob(f"*/*/{JOBS}/{job}/{LAST}"))
    if not found:
        return "it began anew on another node, which saw no checkpoint of it" if again else ""
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    target = own / JOBS / job
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy2(newest, target / LAST)
    return f"it went on from the checkpoint of {newest.relative_to(root).parts[1]}"
