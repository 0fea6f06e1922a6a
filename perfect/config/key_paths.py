"""The paths of a run's keys, such as `phases.0.lr.lr`: which ones the schema has, and how a value
is put at one."""

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from perfect.config.schema import RunConfig

Parts = tuple[str | int, ...]


MOST_DIGITS = 20
"""No list has as many entries as a number of more digits."""


def parts_of(path: str) -> Parts:
    return tuple(
        int(part) if part.isdecimal() and len(part) < MOST_DIGITS else part
        for part in path.split(".")
    )


def why_not(path: str, data: Mapping[str, Any], root: type[BaseModel] = RunConfig) -> str | None:
    """Return why no value can be put at this path of a run; None if one can. `data` is the run as
    it is written, which says how long its lists are."""
    here: list[Any] = [root]
    value: Any = data
    done: list[str] = []
    for part in parts_of(path):
        models = [kind for kind in here if _is_model(kind)]
        lists = [kind for kind in here if get_origin(kind) is list]
        if any(get_origin(kind) is dict for kind in here):
            return None  # the arguments of a user's class may have any key
        if isinstance(part, int) and lists:
            length = len(value) if isinstance(value, list) else 0
            if part >= length:
                place, there = ".".join(done), "entry" if length == 1 else "entries"
                return f"{place} has {length} {there}, counted from 0: give a smaller number"
            here, value = [m for kind in lists for m in _members(get_args(kind)[0])], value[part]
        else:
            found = [m for model in models if part in model.model_fields
                     for m in _members(model.model_fields[str(part)].annotation)]  # fmt: skip
            if not found:
                return _unknown(path, done, models, leaves(root), bool(lists))
            here, value = found, value.get(part) if isinstance(value, dict) else None
        done.append(str(part))
    if any(_is_model(m) for kind in here for m in (kind, *_inner(kind))):
        inside = [one for one in leaves(root) if one.startswith(f"{_general(path)}.")]
        inside.sort(key=lambda one: (len(one), one))
        return f"'{path}' holds other keys: give one of them, such as '{inside[0]}'"
    return None


def _unknown(
    path: str, done: Sequence[str], models: Sequence[type[BaseModel]], keys: set[str], many: bool
) -> str:
    if many:
        place = ".".join(done)
        return f"unknown key '{path}'; {place} is a list: give a number, such as '{place}.0'"
    part, *rest = path.split(".")[len(done) :]
    known = [name for model in models for name in model.model_fields]
    near = difflib.get_close_matches(part, known, n=1)
    if near and part != near[0]:
        return f"unknown key '{path}'; did you mean '{'.'.join((*done, near[0], *rest))}'?"
    last = path.rpartition(".")[2]
    same = sorted(one for one in keys if one.rpartition(".")[2] == last)
    near = same or difflib.get_close_matches(path, sorted(keys), n=1)
    place = f"in {'.'.join(done)} known: " if done else "known: "
    hint = f"did you mean '{near[0]}'?" if near else f"{place}{', '.join(known) or 'none'}"
    return f"unknown key '{path}'; {hint}"


def leaves(model: type[BaseModel] = RunConfig, at: str = "") -> set[str]:
    """Return every path that holds a value; a list is shown by its first entry."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        here = f"{at}{name}"
        kinds = list(_members(field.annotation))
        inner = [(here, kind) for kind in kinds if _is_model(kind)]
        inner += [(f"{here}.0", m) for kind in kinds for m in _inner(kind) if _is_model(m)]
        for place, kind in inner:
            found |= leaves(kind, f"{place}.")
        if not inner:
            found.add(here)
    return found


def put(data: dict[str, Any], path: str, value: Any) -> None:  # Any: plain data of a YAML
    """Put a value at a path, and make the sections that are missing on the way."""
    here: dict[Any, Any] = data
    *way, last = parts_of(path)
    for part in way:
        # A list's places are there already; both kinds take what is put at one of them.
        if isinstance(here, dict) and not isinstance(here.get(part), dict | list):
            here[part] = {}
        here = here[part]
    here[last] = copy.deepcopy(value)


def _general(path: str) -> str:
    return ".".join("0" if part.isdecimal() else part for part in path.split("."))


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _inner(kind: Any) -> Iterator[Any]:
    """Yield what a list holds."""
    if get_origin(kind) is list:
        yield from _members(get_args(kind)[0])


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the kinds that a value may have."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation
