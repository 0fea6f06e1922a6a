"""Formats numbers for readers: short, with a unit, and a dash for an unknown one.

percent 0.4051 -> 40.5 %          accuracy 0.9775 -> 97.75 %    passes   14.4 -> 14.4
fewer   0.4    -> 40.0 % fewer    seconds     150 -> 150.0 s    times    2.02 -> 2.02x
brief   0.0123 -> 12.3 ms         size      2**30 -> 1,024.0 MiB
count   24000  -> 24,000          duration    150 -> 2.5 min
"""

from unicodedata import category

DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


def legible(text: str) -> str:
    """Replace what cannot be shown: control characters, and bytes of a path that are no UTF-8."""
    return "".join("\N{REPLACEMENT CHARACTER}" if category(c) in ("Cc", "Cs") else c for c in text)


def percent(share: float | None, digits: int = 1) -> str:
    # + 0.0 removes the minus before a zero.
    return DASH if share is None else f"{round(100 * share, digits) + 0.0:.{digits}f} %"


def accuracy(share: float | None) -> str:
    return percent(share, 2)


def count(number: float | None) -> str:
    if number is None:
        return DASH
    return f"{number:,.0f}" if abs(number) >= 10_000 else f"{number:.0f}"


def counted(number: float, noun: str) -> str:
    """Return the number with its noun, which is regular: `1 step`, `1200 steps`."""
    return f"{count(number)} {noun}{'s' if number != 1 else ''}"


def passes(number: float | None) -> str:
    if number is None:
        return DASH
    return _round(number) if number >= 1 or not number else f"{number:.2g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    if seconds < 120:
        return f"{_round(seconds)} s"
    if seconds < 7200:
        return f"{_round(seconds / 60)} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


def seconds(number: float | None) -> str:
    return DASH if number is None else f"{number:,.1f} s"


def brief(seconds: float | None) -> str:
    """Format the time of a step: `12.3 ms`."""
    if seconds is None or seconds >= 99.95:
        return duration(seconds)
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:#.3g} {unit}".replace(". ", " ")
    return f"{seconds * 1e6:.3g} \N{MICRO SIGN}s"


def size(nbytes: float | None) -> str:
    """Format bytes of memory: `147.0 MiB`."""
    if nbytes is None:
        return DASH
    mib = nbytes / 2**20
    return f"{mib:,.1f} MiB" if mib >= 0.1 or not mib else f"{mib:.2g} MiB"


def times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{ratio:.2f}{TIMES}"


def fewer(saved: float | None) -> str:
    """Say in words how many decodes were saved."""
    if saved is None:
        return "nothing served yet"
    if abs(saved) < 0.0005:
        return "no decodes saved"
    return f"{percent(abs(saved))} {'fewer' if saved > 0 else 'more'} decodes"


def _round(number: float) -> str:
    """Format with one digit after the point, or none if that digit is zero."""
    return f"{number:.1f}".removesuffix(".0")
