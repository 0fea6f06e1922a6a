"""Values of JSON as the types that they stand for. What is of another type is refused.

typed(Member, {"name": "a", "host": "10.0.0.1", "port": 1})   Member("a", "10.0.0.1", 1)
typed(tuple[int, ...], [1, "x"], "lanes")                     NotOfType: lanes[1] is 'x', no int
"""

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from reprlib import repr as shown
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

MOST = 1 << 2048
"""No sum of floats is larger. Larger numbers could not be shown."""
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""What JSON may hold, and no text that is printed."""


class NotOfType(ValueError):
    """A value is not what is expected at its place."""


def typed(kind: Any, value: Any, where: str) -> Any:
    """Return a value of JSON as `kind`: a plain type, `X | None`, a tuple, a dict by texts, a
    dataclass, or `Any`. `where`: how an error calls its place."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:
        return None if value is None else typed(inner[0], value, where)
    if isinstance(value, dict) and is_dataclass(kind):
        return _made(kind, typed_fields(_kinds_of(kind), value, where), where)
    if isinstance(value, dict) and origin is dict:
        return {typed(str, k, where): typed(inner[1], v, where) for k, v in value.items()}
    if isinstance(value, list) and origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(kinds) == len(value):
            pairs = zip(kinds, value, strict=True)
            return tuple(typed(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(pairs))
    match value:
        case bool():
            fits = kind is bool
        case int():
            fits = kind in (int, float) and abs(value) < MOST
        case str():
            fits = kind is str and not HALF_PAIR.search(value)
        case _:
            fits = type(value) is kind
    if fits:
        return value
    raise NotOfType(f"{where} is {shown(value)}, no {getattr(kind, '__name__', kind)}")


def typed_fields(kinds: Mapping[str, Any], value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a mapping that has exactly these keys, each value as its kind."""
    if odd := kinds.keys() ^ value.keys():
        name = min(odd)
        raise NotOfType(f"{where} {'lacks' if name in kinds else 'must not have'} {shown(name)}")
    return {name: typed(kind, value[name], f"{where}.{name}") for name, kind in kinds.items()}


def _made(kind: Any, fields: dict[str, Any], where: str) -> Any:
    try:
        return kind(**fields)
    except ValueError as error:
        raise NotOfType(f"{where}: {error}") from error


@cache
def _kinds_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
