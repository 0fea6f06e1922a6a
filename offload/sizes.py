"""Amounts of memory as people write them: `8GiB`, `1.5 GB`, `500000`.

number [unit]      B, KiB, MiB, GiB, TiB: powers of 1024      KB, MB, GB, TB: powers of 1000
"""

import math
import re

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB")
WRITTEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")


def parse_size(given: object) -> int:
    """Return the bytes of a whole number or of a text with a unit (in any case)."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        if given >= 1 and given == given // 1:
            return int(given)
    elif isinstance(given, str) and (match := WRITTEN.fullmatch(given)):
        number, unit = match.groups()
        known = next((u for u in UNITS if u.lower() == unit.lower()), None)
        if known is not None and (nbytes := int(float(number) * _bytes_of(known))) >= 1:
            return nbytes
    raise ValueError(f"{given!r} is not a size: give bytes, or a number with a unit, such as 8GiB")


def is_share(given: object) -> bool:
    """Whether this is a text such as `80%`."""
    return isinstance(given, str) and given.strip().endswith("%")


def parse_share(given: str) -> float:
    """Return 0.8 for `80%`."""
    try:
        share = float(given.strip()[:-1]) / 100
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise ValueError(f"{given!r} is no share: give one such as 80%")
    return share


def format_size(nbytes: int) -> str:
    """Return a size for people: `147.0 MiB`."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{nbytes} B"


def format_count(count: int, noun: str) -> str:
    """Return the number with its noun: `1 task`, `1,200 copies`."""
    if count == 1:
        return f"1 {noun}"
    many = f"{noun[:-1]}ie" if noun.endswith("y") else noun
    return f"{count:,} {many}{'es' if noun.endswith(('ch', 's')) else 's'}"


def size_to_give(nbytes: int, given: object) -> str:
    """Return a size that is enough, and at most 1 % more, in the unit of what a user has given:
    `6.21GiB`, or bytes."""
    written = WRITTEN.fullmatch(given) if isinstance(given, str) else None
    unit = "" if written is None else written[2]
    size = _bytes_of(next((u for u in UNITS if u.lower() == unit.lower()), "B"))
    parts = 1
    while size > 1 and nbytes * parts < 100 * size:
        parts *= 10
    count = -(-nbytes * parts // size)
    while parse_size(text := _write(count / parts, unit) if unit else count) < nbytes:
        count += 1  # a float may be a little less than the number that was written
    return str(text)


def _bytes_of(unit: str) -> int:
    return (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0])


def _write(number: float, unit: str) -> str:
    return f"{f'{number:.12f}'.rstrip('0').rstrip('.')}{unit}"
