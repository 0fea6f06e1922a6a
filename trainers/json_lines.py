"""A file of JSON, one object a line, to which a process appends, and which survives a kill.

A line has left the process when `write` returns. A kill may leave half a line at the end: readers
do not see it, and whoever opens the file to append cuts it off.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> list[str]:
    """Return the lines of the file, without a torn last one. There are none if there is no file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode("utf-8", errors="backslashreplace").splitlines()


class JsonLines:
    """Appends to a file. Call `close` at the end, once or more often."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
