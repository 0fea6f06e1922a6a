"""A file of records, one JSON object a line, to which one process appends.

A record has left the process when `append` returns. A crash may leave a torn last line: one without
its newline, or one that is no JSON object. No reader sees it, and the next process that opens the
file to append cuts it off. A damaged line before the last one is an error, which gives its number.
"""

import json
import logging
import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

R = TypeVar("R")


def read_records(path: Path, check: Callable[[int, dict[str, Any]], R]) -> list[R]:
    """Return what `check` makes of the number and the record of each line. If there is no file,
    return nothing. Raise `ValueError` for a damaged line; `check` raises it for a wrong record."""
    records = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            records.append(check(number, parse_object(line)))
        except ValueError as error:
            raise ValueError(f"{path}:{number} is damaged ({error})") from error
    return records


def whole_lines(path: Path) -> list[str]:
    """Return the lines of the file without a torn last one, or nothing if there is no file."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: _end_of_records(data)]
    return whole.decode("utf-8", errors="backslashreplace").split("\n")[:-1]


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text. Raise `ValueError`, which says what is there instead."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is {reprlib.repr(value)}, not an object")
    if "\\u" in text:  # half a character has no UTF-8, which is a ValueError
        json.dumps(value, ensure_ascii=False).encode()
    return value


class RecordFile:
    """Appends records to a file. Call `close` at the end, once or more often."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._full = False
        self._file = path.open("ab", buffering=0)
        data = path.read_bytes()
        self._end = _end_of_records(data)
        self._torn = self._end < len(data)
        if self._torn:
            log.warning("%s has a torn last line, which a crash left: it is cut off", path)
            self._cut_torn_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record, or raise `OSError`: the next call then cuts off what was written."""
        if self._torn:
            self._cut_torn_line()
        line = memoryview(json.dumps(record).encode() + b"\n")
        end = self._end + len(line)
        self._torn = True
        while line:
            line = line[self._file.write(line) :]
        self._torn = False
        self._end = end

    def append_if_it_fits(self, record: Mapping[str, Any]) -> None:
        """Append a record that may be missing. A full disk is logged once, until it is not full."""
        try:
            self.append(record)
            self._full = False
        except OSError as error:
            if not self._full:
                log.error("%s lacks records from here on (%s): free some space", self._path, error)
            self._full = True

    def close(self) -> None:
        self._file.close()

    def _cut_torn_line(self) -> None:
        os.truncate(self._file.fileno(), self._end)
        self._torn = False


def _end_of_records(data: bytes) -> int:
    """Return the position after the last line that is not torn."""
    end = data.rfind(b"\n") + 1
    begin = data.rfind(b"\n", 0, max(0, end - 1)) + 1
    try:
        parse_object(data[begin:end].decode("utf-8", errors="backslashreplace"))
    except ValueError:
        return begin
    return end
