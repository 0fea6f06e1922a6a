"""What refuses a wrong number, an unknown word, and an argument that would have no effect."""

from collections.abc import Sequence
from numbers import Integral


def without_effect(name: str, value: object, needed: str) -> None:
    if value is not None:
        raise ValueError(f"{name}={value!r} has no effect without {needed}: leave it out")


def at_least_one(name: str, value: int) -> None:
    if not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def one_of(name: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, not {value!r}")
