"""What a stream is read from: a source has passes, and a pass is read from front to back.

source.begin(turn)          -> raw samples 0, 1, 2, ... of this pass and rank
source.begin(turn, place)   -> those from a place on that a raw sample of the same turn had
source.decode(raw)          -> the sample; several threads call it, in any order
"""

from dataclasses import dataclass
from typing import Any, Protocol

from loaders.pixels.decoding import Room

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


class StreamReading(Protocol):
    """The raw samples of one pass."""

    def __next__(self) -> RawSample: ...

    def skip(self, count: int) -> int:
        """Pass over so many samples; returns how many there were."""
        ...

    def close(self) -> None:
        """Let go of files. It is safe to call this again."""
        ...


class StreamSource(Protocol):
    """Where the samples of all passes come from."""

    def begin(self, turn: StreamTurn, place: Place | None = None) -> StreamReading: ...

    def decode(self, raw: RawSample) -> Any: ...

    def decode_into(self, raw: RawSample, room: Room) -> Any:
        """Like `decode`, with the pixels in the memory that `room` gives where that saves a
        copy."""
        ...

    def check(self, world_size: int) -> None:
        """Refuse a number of ranks that cannot share this source out without doubles."""
        ...

    @property
    def samples(self) -> int | None:
        """How many samples a pass of all ranks has. None: nobody says it."""
        ...

    @property
    def given(self) -> int | None:
        """The same, where the user says it, and not the source itself."""
        ...

    @property
    def is_read_twice(self) -> bool:
        """Whether its first samples are read twice, to see whether it draws by chance."""
        ...

    @property
    def identity(self) -> str:
        """A digest or a name. A saved state of a source with another one is refused."""
        ...
