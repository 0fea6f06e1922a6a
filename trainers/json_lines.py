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
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

log = logging.getLogger(__name__)

T = TypeVar("T")


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


def checked(found: T) -> T:
    """Return a dataclass that was read. Raise `TypeError` if a field is not of the field's type."""
    for name, kind in get_type_hints(type(found)).items():
        if not fits(value := getattr(found, name), kind):
            raise TypeError(f"{name} is {reprlib.repr(value)}")
    return found


def fits(value: Any, kind: Any) -> bool:
    """Whether a value out of JSON is of a type. A mapping of types is the type of an object that
    has at least its keys."""
    if isinstance(kind, Mapping):
        return isinstance(value, Mapping) and all(
            name in value and fits(value[name], one) for name, one in kind.items()
        )
    origin, inner = get_origin(kind), get_args(kind)
    if value is None:
        return NoneType in inner
    if origin is UnionType:
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            return False
        kinds = inner if origin is tuple and inner[1:] != (...,) else inner[:1] * len(value)
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    if isinstance(value, int) and kind is not bool:
        return kind in (int, float) and not isinstance(value, bool) and value.bit_length() < 64
    return isinstance(value, kind)


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
