"""A file of JSON, one object a line, to which a process appends, and which survives a kill.

A line has left the process when `write` returns. A kill may leave half a line at the end: readers
do not see it, and whoever opens the file to append cuts it off, and says so. A line that did not
fit on the disk is taken back, so that the next one begins where it should.
"""

import json
import logging
import os
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def whole_lines(path: Path) -> list[str]:
    """Return the lines of the file, without a torn last one. There are none if there is no file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode("utf-8", errors="backslashreplace").split("\n")[:-1]


def read_object(line: str) -> dict[str, Any]:
    """Return the object in a line. Raise `ValueError`, which says what is there instead."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is {reprlib.repr(found)}, not an object")
    if "\\u" in line:  # half a character has no UTF-8, which is a ValueError
        json.dumps(found, ensure_ascii=False).encode()
    return found


class JsonLines:
    """Appends to a file. Call `close` at the end, once or more often."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._full = False
        self._file = path.open("ab", buffering=0)
        data = path.read_bytes()
        self._end = data.rfind(b"\n") + 1
        if self._end < len(data):
            log.warning("%s ended in half a line, which is cut off: a kill tore it", path)
            os.truncate(path, self._end)

    def write(self, line: Mapping[str, Any]) -> None:
        left = memoryview(json.dumps(line).encode() + b"\n")
        end = self._end + len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):
                os.truncate(self._path, self._end)
            raise
        self._end = end

    def write_if_it_fits(self, line: Mapping[str, Any]) -> None:
        """Append a line that may be missing. A disk that is full is told once, until it is not."""
        try:
            self.write(line)
            self._full = False
        except OSError as error:
            if not self._full:
                log.error("%s is not gone on with (%s): free some space", self._path, error)
            self._full = True

    def close(self) -> None:
        self._file.close()
