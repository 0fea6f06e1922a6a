"""The messages between peers and the anchor: each kind, with the types of its fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from trainers.elastic.deciding.view import Member, View
from trainers.elastic.wire.message import PAYLOAD, Kinds

TO_ANCHOR: Kinds = MappingProxyType(
    {
        "hello": {
            "member": Member,
            "manifest": dict[str, str],
            "has_step": int,
            "view": View | None,
            "step": int,
        },
        "beat": {"step": int},
        "ready": {"donor": str},
        "gate": {"generation": int, "step": int, "planned": bool},
        "leave": {},
        "ended": {"step": int, "digest": str},
        "put": {"generation": int, "key": str, PAYLOAD: Any},
        "get": {"generation": int, "key": str, "ticket": int},
    }
)
TO_PEER: Kinds = MappingProxyType(
    {
        "welcome": {"heartbeat": float, "min_peers": int},
        "refuse": {"why": str},
        "expel": {"why": str},
        "found": {},
        "copy": {"donor": Member},
        "announce": {"generation": int},
        "break": {"generation": int, "why": str},
        "form": {"view": View, "step": int, "finished": tuple[int, str] | None},
        "value": {"ticket": int, PAYLOAD: Any},
        "waits": {"why": str},
    }
)

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


@dataclass(frozen=True, slots=True)
class Question:
    """A member waits for a key."""

    name: str
    generation: int
    key: str
    ticket: int


class MeetingPlace:
    """The values of the newest generation, and who waits for which."""

    def __init__(self) -> None:
        self._generation = 0
        self._values: dict[str, bytes] = {}
        self._open: list[Question] = []

    def begin(self, generation: int) -> None:
        """Forget all earlier generations."""
        self._generation = generation
        self._values.clear()
        self._open.clear()

    def put(self, generation: int, key: str, value: bytes | memoryview) -> None:
        if generation == self._generation:
            self._values[key] = bytes(value)

    def ask(self, name: str, generation: int, key: str, ticket: int) -> None:
        self._open.append(Question(name, generation, key, ticket))

    def answers(self) -> list[tuple[str, int, bytes]]:
        """Return member, ticket and value of all questions that can be answered now."""
        ready = [q for q in self._open if q.generation == self._generation]
        ready = [q for q in ready if q.key in self._values]
        self._open = [q for q in self._open if q not in ready and q.generation == self._generation]
        return [(q.name, q.ticket, self._values[q.key]) for q in ready]
