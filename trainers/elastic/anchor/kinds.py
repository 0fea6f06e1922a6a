"""The messages between peers and the anchor: each kind, with the types of its fields."""

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
