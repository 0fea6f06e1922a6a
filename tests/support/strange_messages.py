"""Messages as they should be, and what becomes of them where one part is wrong."""

from collections.abc import Iterator
from typing import Any

Fields = dict[str, Any]

MEMBER = {"name": "a", "host": "127.0.0.1", "port": 9}
VIEW = {"generation": 1, "members": [MEMBER]}
HELLO: Fields = {"member": MEMBER, "manifest": {"m": "1"}, "has_step": 0, "view": None, "step": 0}
TO_ANCHOR: dict[str, Fields] = {
    "hello": HELLO,
    "beat": {"step": 1},
    "ready": {"donor": "b"},
    "gate": {"generation": 0, "step": 1, "planned": True},
    "leave": {},
    "ended": {"step": 1, "digest": "d"},
    "put": {"generation": 0, "key": "k"},
    "get": {"generation": 0, "key": "k", "ticket": 1},
}
TO_PEER: dict[str, Fields] = {
    "welcome": {"heartbeat": 2.0, "min_peers": 1},
    "refuse": {"why": "w"},
    "copy": {"donor": MEMBER},
    "break": {"generation": 1, "why": "w"},
    "form": {"view": VIEW, "step": 1, "finished": [1, "d"]},
    "value": {"ticket": 1},
}
LOGS = {"samples": 1, "loss": 2, "values": [["n", "{}", None]], "touched": "0x1"}
COMMIT: Fields = {"step": 1, "added": [["a", [0, 1]]], "logs": LOGS, "digest": "d"}
WRONG: tuple[Any, ...] = (
    None, True, -(10**4000), 1.5, "", "x\n", "\ud800", "y" * 300, [], [[]], {},
    {"": 1}, [1, 2],
)  # fmt: skip
MALFORMED_MEMBERS = [
    MEMBER | change
    for change in (
        {"name": ""}, {"name": "a\nb"}, {"name": "\ud800"}, {"name": "n" * 300}, {"name": "../a"},
        {"host": "\0"}, {"port": -1}, {"port": 10**20}, {"port": True}, {"port": "9"}, {"more": 1},
    )
]  # fmt: skip
MALFORMED_VIEWS = [
    VIEW | {"members": [MEMBER, MEMBER]},
    VIEW | {"members": {}},
    {"generation": 1},
    *(VIEW | {"members": [member]} for member in MALFORMED_MEMBERS),
]


def malformed(fields: Fields) -> Iterator[Fields]:
    """Yield fields of which one is missing, too many, or of another type."""
    yield fields | {"more": 1}
    for name, right in fields.items():
        yield {key: value for key, value in fields.items() if key != name}
        for wrong in WRONG:
            if not _may_be(name, right, wrong):
                yield fields | {name: wrong}
        if name in ("member", "donor") and isinstance(right, dict):
            yield from (fields | {name: member} for member in MALFORMED_MEMBERS)
        if name == "view":
            yield from (fields | {name: view} for view in MALFORMED_VIEWS)


def _may_be(name: str, right: Any, wrong: Any) -> bool:
    """Whether this is as good: an unlike text, an empty list, or none where there may be one."""
    if name in ("view", "finished") and wrong is None:
        return name == "finished" or right is None
    if isinstance(right, str):
        return isinstance(wrong, str) and wrong != "\ud800"
    if isinstance(right, float):
        return wrong == 1.5
    if isinstance(right, list) and not right:
        return wrong in ([], [1, 2])
    return type(wrong) is type(right) and wrong in ([], {}, True)
