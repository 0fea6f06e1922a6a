"""What two peers must have in common, by key: digests of their configuration, model and data, and
versions."""

from collections.abc import Mapping
from itertools import islice

SHOWN_KEYS = 3
SHORT = 12


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Name the first keys that differ, with both values, or return None if none does."""
    keys = [*mine, *(key for key in theirs if key not in mine)]
    differing = [key for key in keys if mine.get(key) != theirs.get(key)]
    if not differing:
        return None
    texts = [
        _describe_difference(key, mine.get(key), theirs.get(key))
        for key in islice(differing, SHOWN_KEYS)
    ]
    if left := len(differing) - len(texts):
        texts.append(f"{left} more differ: {', '.join(differing[SHOWN_KEYS:])}")
    return "; ".join(texts)


def _describe_difference(key: str, mine: str | None, theirs: str | None) -> str:
    length = SHORT
    if mine is not None and theirs is not None and mine[:length] == theirs[:length]:
        length = max(len(mine), len(theirs))  # Shortened, they would look equal.
    return f"{key} is {_short(mine, length)} here and {_short(theirs, length)} there"


def _short(value: str | None, length: int) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= length else f"{value[:length]}..."
