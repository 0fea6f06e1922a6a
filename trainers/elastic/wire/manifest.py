"""What two peers must have in common, as digests by key: configuration, model, data, versions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from trainers.elastic.wire.wire_errors import BadFrame

SHOWN_KEYS = 3
SHORT = 12


@dataclass(frozen=True, slots=True, eq=False)
class Manifest(Mapping[str, str]):
    """Digests, or short texts such as a version, by key. It is a mapping that cannot change."""

    entries: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, digests: Mapping[str, str]) -> "Manifest":
        """Freeze a mapping, in its order. What came in a message is checked."""
        for key, value in digests.items():
            if not (isinstance(key, str) and isinstance(value, str)):
                raise BadFrame(f"a manifest holds texts by key, not {key!r}: {value!r}")
        return cls(tuple(digests.items()))

    def __getitem__(self, key: str) -> str:
        for known, value in self.entries:
            if known == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def difference(mine: Manifest, theirs: Manifest) -> str | None:
    """Name the first keys that differ, with both values, or return None if none does."""
    keys = [*mine, *(key for key in theirs if key not in mine)]
    differing = [key for key in keys if mine.get(key) != theirs.get(key)]
    if not differing:
        return None
    told = [_told(key, mine.get(key), theirs.get(key)) for key in islice(differing, SHOWN_KEYS)]
    if left := len(differing) - len(told):
        told.append(f"{left} more differ: {', '.join(differing[SHOWN_KEYS:])}")
    return "; ".join(told)


def _told(key: str, mine: str | None, theirs: str | None) -> str:
    length = SHORT
    if mine is not None and theirs is not None and mine[:length] == theirs[:length]:
        length = max(len(mine), len(theirs))  # Shortened, they would look equal.
    return f"{key} is {_short(mine, length)} here and {_short(theirs, length)} there"


def _short(value: str | None, length: int) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= length else f"{value[:length]}..."
