"""What a member says of itself in the middle of a step. Members exchange headers, then all decide.

A header says what the member has, and wishes nothing: `decision.py` says what follows. It travels
as JSON of some hundred bytes.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LaneLogs:
    """What a member's lanes of this step gave, summed over them and weighted by samples."""

    samples: int = 0
    loss: float = 0.0
    values: tuple[tuple[str, float], ...] = ()
    """What the module logged, by name."""
    touched: str = ""
    """Which parameters have a gradient: a bit each, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class Header:
    """One member's."""

    name: str
    step: int
    """So many steps are applied to its weights; this one is under way."""
    done: tuple[int, ...] = ()
    """The lanes that are in its sums, in the order in which they were added."""
    had: tuple[int, ...] = ()
    """The lanes that were dealt to it last, and stay with it where that costs no time."""
    held: str = ""
    """The digest of this step's total, if the member has it and has not applied it."""
    kept: str = ""
    """The digest of the total that it applied last."""
    rate: float = 0.0
    """Lanes a second; 0.0 before the first."""
    announced: bool = False
    """Whether it has heard that this generation shall change."""
    weights: str = ""
    """The digest of the part of the weights that is due in this step; "" where none was made."""
    logs: LaneLogs = LaneLogs()
    trouble: str = ""
    """What keeps the run from going on, for example a loss that is no number; "" if nothing."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Header":
        found: dict[str, Any] = json.loads(data)
        logs = found.pop("logs")
        values = tuple((name, value) for name, value in logs.pop("values"))
        found["done"], found["had"] = tuple(found["done"]), tuple(found["had"])
        return cls(**found, logs=LaneLogs(**logs, values=values))
