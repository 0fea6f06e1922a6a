"""Values of JSON as the types that they stand for. What is of another type is refused.

typed(Member, {"name": "a", "host": "10.0.0.1", "port": 1})   Member("a", "10.0.0.1", 1)
typed(tuple[int, ...], [1, "x"], "lanes")                     NotOfType: lanes[1] is 'x', no int
typed({"step": int}, {"step": 1, "why": "b is gone"})         the same: `why` is not looked at
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from reprlib import repr as shown
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

BITS = 63
"""Larger whole numbers are refused, unless their type names another number of bits."""
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""What JSON may hold, and no text that is printed."""


class NotOfType(ValueError):
    """A value is not what is expected at its place."""


def typed(kind: Any, value: Any, where: str) -> Any:
    """Return a value of JSON as `kind`: a plain type, `X | None`, a tuple, a dict by texts, a
    dataclass, or `Any`. A mapping of types stands for an object that has at least its keys.
    `where`: how an error calls its place."""
    kind, bits = get_args(kind) if get_origin(kind) is Annotated else (kind, BITS)
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return None if value is None else typed(inner[0], value, where)
    if isinstance(kind, Mapping):
        known = {name: part for name, part in typed(dict, value, where).items() if name in kind}
        return value | typed_fields(kind, known, where)
    if isinstance(value, dict) and is_dataclass(kind):
        known = typed_fields(_kinds_of(kind), value, where)
        make: Any = kind
        try:
            return make(**known)
        except ValueError as error:
            raise NotOfType(f"{where}: {error}") from error
    if isinstance(value, dict) and origin is dict:
        return {typed(str, k, where): typed(inner[1], v, where) for k, v in value.items()}
    if isinstance(value, list | tuple) and origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(kinds) == len(value):
            pairs = zip(kinds, value, strict=True)
            return tuple(typed(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(pairs))
    match value:
        case bool():
            fits = kind is bool
        case int():
            fits = kind in (int, float) and value.bit_length() <= bits
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


@cache
def _kinds_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def with_defaults(kind: Any, value: Any) -> Any:
    """Return an object, which an earlier version may have written, with the defaults of the fields
    that it lacks. `kind`: the dataclass that it stands for."""
    if not (is_dataclass(kind) and isinstance(value, dict)):
        return value
    known = _kinds_of(kind)
    filled = {one.name: one.default for one in fields(kind) if one.default is not MISSING}
    return filled | {name: with_defaults(known.get(name), part) for name, part in value.items()}
