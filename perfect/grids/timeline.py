"""Writes down which job was in which state, and since when: a line whenever one changes.

    {"at": 1763887000.2, "job": "lr=1e-3", "phase": "running", "device": 0, "step": 40}
    {"at": 1763887003.9, "job": "lr=1e-3", "phase": "at_rung", "device": 0, "step": 50}
    {"at": 1763887420.0, "program": "ends"}          and "begins", when it goes on

It is for the report (perfect/report/fleet_record.py reads it). A kill loses nothing but how long
the last states went on, and a full disk only what it has no room for.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.fleet.deciding.events import Event
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.record_file import RecordFile


class Timeline:
    """A context manager. Its `see` is for `Fleet(watch=...)`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._file: RecordFile | None = None
        self._last: dict[str, tuple[str, int | None]] = {}

    def __enter__(self) -> "Timeline":
        self._file = RecordFile(self._path)
        self._write({"program": "begins"})
        return self

    def __exit__(self, *_: object) -> None:
        self._write({"program": "ends"})
        assert self._file is not None
        self._file.close()
        self._file = None

    def see(self, state: FleetState, _event: Event) -> None:
        """Note the jobs that are in another state than before."""
        for job in state.jobs.values():
            now = (job.phase, job.device)
            if self._last.get(job.name) != now:
                self._last[job.name] = now
                self._write(
                    {"job": job.name, "phase": job.phase, "device": job.device, "step": job.step}
                )

    def _write(self, row: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.append_if_it_fits({"at": round(self._clock(), 3), **row})
