"""What a stream is read from: a source has passes, and a pass is read from front to back.

source.begin(turn)          -> raw samples 0, 1, 2, ... of this pass and rank
source.begin(turn, place)   -> those from a place on that a raw sample of the same turn had
       ..., skip=n)            the first n of them come without data
source.decode(raw)          -> the sample; several threads call it, in any order
source.check(ranks)         refuses a number of ranks that cannot share it out without doubles
source.samples              how many a pass of all ranks has. None: nobody says it
source.given                the same, where the user says it, and not the source itself
source.is_read_twice        whether its first samples are, to see whether it draws by chance
source.identity             a state of a source with another one is refused
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

Place = dict[str, Any]
"""Where a raw sample lies, as numbers and words that a state can hold."""


@dataclass(frozen=True, slots=True)
class StreamTurn:
    """One pass of one rank."""

    pass_index: int
    seed: int
    shuffle: bool
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample as it was read. It is not decoded yet."""

    name: str
    """What errors call it."""
    data: Any
    place: Place | None = None
    """Where reading may go on with this sample. None: that is not told for this one."""
    mark: str = ""
    """What another sample at its position would have otherwise. Empty: that is not told."""


StreamReading = Generator[RawSample]
"""The raw samples of one pass. Whoever leaves it early closes it, which lets go of files."""
