"""The folder of a grid: the grid it belongs to, its jobs, and what came of them.

grid.yaml       all keys; the folder belongs to this grid alone, but HOW may change
journal.jsonl   the fleet's events, from which it goes on
timeline.jsonl  which job was in which state, and since when
grid.json       the results of all jobs         report.html  the same as a page
jobs/NAME/      the folder of a run             jobs/NAME/output.txt  what it said
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from perfect.config.grid import Grid
from perfect.config.yaml_reader import read_dump
from perfect.errors import ConfigError, FolderError
from perfect.runs.folder import differences, is_folder
from perfect.runs.record import write_whole

HOW = ("devices", "budget", "host_budget", "quantum", "hours")
"""These keys of `fleet` change no job's results, so a grid may be resumed with other ones."""


class GridFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.grid = path / "grid.yaml"
        self.timeline = path / "timeline.jsonl"
        self.results = path / "grid.json"
        self.report = path / "report.html"

    def open(self, grid: Grid) -> None:
        """Make the folder. Raise `FolderError` if this grid may not run here."""
        plain = grid.dump()
        if is_folder(self.path) and self.grid.exists():
            self._compare(plain)
        elif self.path.exists() and any(self.path.iterdir()):
            raise FolderError(
                f"{self.path} is not empty and holds no grid (no grid.yaml): give another --out"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.grid, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        except OSError as error:
            raise FolderError(
                f"{self.path} cannot be written ({error}): free some space, or give another --out"
            ) from error

    def _compare(self, mine: dict[str, Any]) -> None:
        try:
            theirs = read_dump(self.grid)
        except ConfigError as error:
            raise FolderError(f"{self.grid} is damaged ({error}): give another --out") from error
        odd = differences(_what(theirs), _what(mine))
        if odd:
            more = "; ..." if len(odd) > 5 else ""
            raise FolderError(
                f"{self.path} holds another grid: {'; '.join(odd[:5])}{more}. Give another --out,"
                " or delete the folder"
            )

    def write(self, results: Mapping[str, Any]) -> None:
        """Write grid.json, whole or not at all."""
        write_whole(self.results, json.dumps(results, indent=1) + "\n")


def _what(plain: Any) -> Any:
    """Return the grid without the keys that only say how it is made."""
    if not isinstance(plain, dict):
        return plain
    fleet = plain.get("fleet")
    kept = {key: value for key, value in plain.items() if key not in ("fleet", "offload")}
    if isinstance(fleet, dict):
        kept["fleet"] = {key: value for key, value in fleet.items() if key not in HOW}
    return kept
