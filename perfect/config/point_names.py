"""Names the points of a grid: readable, unlike one another, and fit for a folder's name.

    {"optimizer.lr": 0.0003, "loader.batch_size": 16}   ->   lr=3e-4,batch_size=16

A key is named by the end of its first path, with as many parts as tell it from the other keys.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

LONGEST = 120
"""A file system takes names of up to 255 bytes, and files beside a folder have longer ones."""
ODD = re.compile(r"[^\w.=,+%-]", re.ASCII)


def key_names(keys: Sequence[str]) -> list[str]:
    """Return the short name of each key; a key may have several paths."""
    paths = [key.split(",")[0].strip().split(".") for key in keys]
    names = []
    for path in paths:
        ends = (".".join(path[-n:]) for n in range(1, len(path) + 1))
        whole = ".".join(path)
        names.append(next((end for end in ends if _owners(end, paths) == 1), whole))
    return names


def _owners(end: str, paths: Sequence[Sequence[str]]) -> int:
    return sum(f".{'.'.join(path)}".endswith(f".{end}") for path in paths)


def point_name(names: Sequence[str], values: Sequence[object]) -> str:
    pairs = zip(names, values, strict=True)
    return ",".join(f"{name}={value_text(value)}" for name, value in pairs)


def unlike(names: Sequence[str]) -> list[str]:
    """Return names for folders. Those that would be equal, or are too long, get a number."""
    made: list[str] = []
    for name in names:
        safe = ODD.sub("_", name)[:LONGEST].lstrip(".") or "_"
        again = (f"{safe}-{number}" for number in itertools.count(2))
        made.append(safe if safe not in made else next(one for one in again if one not in made))
    return made


def value_text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list | tuple):
        return "-".join(map(value_text, value))
    if isinstance(value, Mapping):
        return "-".join(f"{key}={value_text(part)}" for key, part in value.items())
    return str(value)


def _number(value: float) -> str:
    """Return all digits of a number, as `3e-4` if that is shorter than `0.0003`."""
    plain = repr(value).removesuffix(".0")
    if not math.isfinite(value):
        return plain
    digits = next(text for n in range(18) if float(text := f"{value:.{n}e}") == value)
    mantissa, _, power = digits.partition("e")
    short = f"{mantissa}e{int(power)}"
    return min(plain, short, key=len)
