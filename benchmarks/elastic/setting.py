"""What a part is asked for on the command line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setting:
    """Of one run of a part."""

    smoke: bool
    repeats: int
    work: Path | None
    """soak: the folder of the rounds that are done; peers: that of the others' environments."""
