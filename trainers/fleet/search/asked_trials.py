"""What a sampler was asked so far, in the fleet's folder.

After a restart the sampler is asked the same again, and must answer the same: else the checkpoints
of a job would belong to other parameters than the job.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.fleet.deciding.fleet_error import FleetError
from trainers.plain_values import typed
from trainers.record_file import parse_object

SEARCH_FILE = "search.json"


class AskedTrials:
    """The parameters of each job, by its name."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SEARCH_FILE
        self._asked: dict[str, dict[str, Any]] | None = None

    def exist(self) -> bool:
        """Whether a search has begun in this folder."""
        return self._path.exists()

    def note(self, job: str, params: Mapping[str, Any]) -> None:
        """Keep the parameters of a job. Raise `FleetError` if it had others before a restart."""
        if self._asked is None:
            self._asked = self.read()
        now = json.loads(json.dumps(dict(params)))
        before = self._asked.setdefault(job, now)
        if before != now:
            raise FleetError(
                f"{job} had the parameters {before} before the restart, and is asked to have {now}"
                f" now ({self._path}): give the sampler, its seed and the space that it had before,"
                " or another folder"
            )
        self._write(self._asked)

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of all jobs. Raise `FleetError` if their file is damaged."""
        if not self._path.exists():
            return {}
        try:
            asked = parse_object(self._path.read_text(encoding="utf-8"))
            return typed(dict[str, dict[str, Any]], asked, "it")
        except (OSError, ValueError) as error:
            raise FleetError(
                f"{self._path} is damaged ({error}): delete the fleet's folder to begin anew"
            ) from error

    def _write(self, asked: Mapping[str, Any]) -> None:
        """Replace the file as a whole, so that a kill leaves the old one or the new one."""
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("w", encoding="utf-8") as file:
                json.dump(asked, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            raise FleetError(
                f"{self._path} could not be written ({error}): free some space; the same program"
                " then goes on"
            ) from error
