"""What a member says of itself in the middle of a step. Members exchange headers, then all decide.

A header says what the member has, and wishes nothing: `decision.py` says what follows. It travels
as JSON of some hundred bytes.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated

from trainers.plain_values import typed

UNIT = 2.0**-40
"""Losses and what is logged are summed as multiples of this, so no order of lanes changes a sum."""
Units = Annotated[int, 2048]
"""A sum of floats in units. None has more bits."""


@dataclass(frozen=True, slots=True)
class LaneLogs:
    """What lanes of a step gave, summed over them and weighted by samples."""

    samples: int = 0
    loss: Units | None = 0
    """In units. None: it is not finite."""
    values: tuple[tuple[str, str, Units | None], ...] = ()
    """What the module logged: its name, the options of the call as JSON, and the sum in units. A
    peer that has no lane in a step logs it all the same."""
    touched: str = "0x0"
    """Which parameters have a gradient: a bit each, in hexadecimal."""

    def __post_init__(self) -> None:
        int(self.touched, 16)  # A text that is no number is refused here.

    def plus(self, other: "LaneLogs") -> "LaneLogs":
        """Return the logs of both together."""
        values = {(name, options): value for name, options, value in self.values}
        for name, options, value in other.values:
            values[name, options] = sum_of_units(values.get((name, options), 0), value)
        return LaneLogs(
            self.samples + other.samples,
            sum_of_units(self.loss, other.loss),
            tuple((*key, values[key]) for key in sorted(values)),
            hex(int(self.touched, 16) | int(other.touched, 16)),
        )

    def mean(self, units: int | None) -> float:
        """Return a sum over all samples as their mean."""
        return math.nan if units is None else units * UNIT / self.samples


def in_units(value: float) -> int | None:
    """Return a number as a multiple of `UNIT`; None if it is not finite."""
    return round(value / UNIT) if math.isfinite(value) else None


def sum_of_units(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


@dataclass(frozen=True, slots=True)
class MemberPace:
    """How fast a member computes, and what it has sent."""

    rate: float = 0.0
    """Lanes a second, smoothed over the last steps; 0.0 before it is known."""
    idle: int = 0
    seconds: float = 0.0
    """How long it has computed the lanes that are in its sums, with the time that it waited for
    their samples."""
    sent: int = 0
    """Bytes of sums that it has sent to other members in reduces since it joined, without this
    step's."""


@dataclass(frozen=True, slots=True)
class Header:
    """One member's."""

    name: str
    step: int
    """The number of steps that are applied to its weights; this one is under way."""
    done: tuple[int, ...] = ()
    """The lanes that are in its sums, in the order in which they were added."""
    had: tuple[int, ...] = ()
    """The lanes that were dealt to it last. It keeps them where that costs no time."""
    held: str = ""
    """The digest of this step's total, if the member has it and has not applied it."""
    kept: str = ""
    """The digest of the total that it has applied last; "" before the first."""
    pace: MemberPace = MemberPace()
    announced: bool = False
    weights: str = ""
    """The digest of the part of the weights that is compared in this step; "" if not made."""
    logs: LaneLogs = LaneLogs()
    trouble: str = ""
    """What stops the run, for example a loss that is not finite; "" if nothing does."""

    @property
    def samples_per_second(self) -> float:
        """The samples that it computed a second in this step; 0 if it had no lane."""
        return self.logs.samples / self.pace.seconds if self.pace.seconds else 0.0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Header":
        """Return a header. Raise `ValueError` for anything else."""
        return typed(cls, json.loads(data), "a header")
