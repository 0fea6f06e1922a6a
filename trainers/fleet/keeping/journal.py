"""The journal of a fleet: every event as a line of JSON. Replaying them gives the same decisions.

    {"fleet": {...}}                                      which fleet this is
    {"settings": {...}}                                   devices and memory, at every beginning
    {"event": "TurnEnded", "job": "a", "step": 40, ...}   one line an event

An event is written before its decision is carried out, so a kill of the process loses none. It may
leave half a line at the end, whose decision was never carried out (record_file.py).
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from trainers.fleet.deciding.events import (
    Departed,
    Event,
    FleetError,
    Planned,
    StepTimes,
    TimeChecked,
)
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.folder_lock import hold_folder
from trainers.plain_values import typed, with_defaults
from trainers.record_file import RecordFile, read_records

LOCK = "fleet.lock"
NAME = "journal.jsonl"
NAMES = MappingProxyType(
    {kind: kind.__name__ for kind in get_args(Event)} | {Departed: "Left", TimeChecked: "TimeTold"}
)
KINDS = MappingProxyType({name: kind for kind, name in NAMES.items()})
TIMES = tuple(field.name for field in fields(StepTimes))
"""`Planned.times` is written as these keys of the event itself."""


class Journal:
    """Call `open`, and `close` at the end."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._held = ExitStack()
        self._file: RecordFile | None = None

    def open(self, fleet: Mapping[str, Any]) -> list[Event | FleetSettings]:
        """Open the journal for writing, and return its events, with the settings of each process
        before its events. `fleet`: what must stay the same. Raise `FleetError` if the journal
        belongs to another fleet, or another process has it open."""
        try:
            folder, lock = self.path.parent, self.path.with_name(LOCK)
            folder.mkdir(parents=True, exist_ok=True)
            lock.touch()
            if not self._held.enter_context(hold_folder(lock)):
                raise FleetError(
                    f"another process runs the fleet of {folder}, or another Fleet of this one"
                    " does: wait for its end, end it with Ctrl-C, or give another folder"
                )
            past = read_records(self.path, self._read)
            self._file = RecordFile(self.path)
        except OSError as error:
            raise FleetError(
                f"{self.path} cannot be written ({error}): make its folder writable, or give"
                " another one"
            ) from error
        except ValueError as error:
            raise FleetError(f"{error}: delete the folder to begin anew") from error
        if not past:
            self._write({"fleet": dict(fleet)})
            return []
        theirs = past[0]
        if theirs != json.loads(json.dumps(dict(fleet))):
            raise FleetError(
                f"{self.path} is the journal of another fleet: {theirs} there, {dict(fleet)} here."
                " Give another folder, or delete this one"
            )
        return past[1:]

    def begin(self, settings: FleetSettings) -> None:
        """Write the settings of this process, without the rule, which `open` has compared."""
        self._write({"settings": asdict(replace(settings, rule=None))})

    def write(self, event: Event) -> None:
        """Write an event."""
        line = {"event": NAMES[type(event)], **asdict(event)}
        if isinstance(event, Planned):
            line |= line.pop("times")
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.append(line)
        except OSError as error:
            raise FleetError(
                f"{self.path} could not be written ({error}): free some space; the same program"
                " then goes on"
            ) from error

    def _read(self, number: int, record: dict[str, Any]) -> Any:
        """Return what a record holds: the first one the fleet, others an event or settings."""
        if number == 1:
            return record.get("fleet")
        try:
            if "settings" in record:
                kind, values = FleetSettings, record["settings"]
            else:
                kind, values = KINDS[record.pop("event")], record
            if kind is Planned:
                values["times"] = {name: values.pop(name) for name in TIMES}
            return typed(kind, with_defaults(kind, values), kind.__name__)
        except (KeyError, TypeError) as error:
            raise ValueError(f"or of another version: {error!r}") from error

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # every line was flushed, or its error was raised
                self._file.close()
            self._file = None
        self._held.close()
