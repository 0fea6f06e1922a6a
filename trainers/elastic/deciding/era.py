"""The lives of a run: each begins with the first weights, or with a checkpoint when all had died.

    era x (1), from step 0     0 1 2 3 4 5 |      all peers die; a checkpoint is of step 3
    era y (2), after x, from 3       3 4 | all die again
    era z (3), after x, from 3       3 4 5 6 7          what counts: 0 1 2 of x, and all of z

The peer that begins an era makes its id, and all others have it with the state that they are given.
So which steps count is known without a clock: those of different peers may be hours apart.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from trainers.plain_values import typed, with_defaults

UNKNOWN = ""
"""The id of steps from a time in which no era was noted. They are taken for one era."""


@dataclass(frozen=True, slots=True)
class Era:
    """One life of a run."""

    id: str
    """It is made up, and no other era has it."""
    number: int
    """Higher than that of every era which the peer knew that began this one."""
    after: str = UNKNOWN
    """The era in which its checkpoint was written."""
    step: int = 0
    """So many steps were applied when it began."""

    def plain(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)

    @classmethod
    def of_plain(cls, told: object) -> "Era":
        """Raise `ValueError` for what is no era."""
        return typed(cls, with_defaults(cls, told), "an era")


class TwoLives(ValueError):
    """Two eras go on from each other's past, and neither knows of the other."""


def steps_that_count(eras: Iterable[Era]) -> dict[str, float]:
    """Return up to which step (not included) each era's steps count; an era that is not named
    counts not at all. Raise `TwoLives` if nothing says which era was the last."""
    known = {era.id: era for era in eras}
    if not known:
        return {UNKNOWN: math.inf}
    newest = max(era.number for era in known.values())
    last, *others = sorted(
        (era for era in known.values() if era.number == newest), key=lambda era: era.id
    )
    if others:
        lives = " and ".join(f"{era.id} from step {era.step} on" for era in (last, *others))
        raise TwoLives(f"two lives of the run do not know of each other: {lives}")
    found: dict[str, float] = {last.id: math.inf}
    era: Era | None = last
    until = math.inf
    while era is not None:
        until = min(until, era.step)
        found[era.after] = until
        era = known.pop(era.after, None)
    return found
