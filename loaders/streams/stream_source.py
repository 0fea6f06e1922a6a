"""What a stream is read from: a source has passes, and a pass is read from front to back.

source.begin(turn)          -> raw samples 0, 1, 2, ... of this pass and rank
source.begin(turn, place)   -> those from a place on that a raw sample of the same turn had
source.decode(raw)          -> the sample; several threads call it, in any order
"""

from collections.abc import Generator
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


StreamReading = Generator[RawSample]
"""The raw samples of one pass. Whoever leaves it early closes it, which lets go of files."""


class StreamSource(Protocol):
    """Where the samples of all passes come from."""

    def begin(self, turn: StreamTurn, place: Place | None = None, skip: int = 0) -> StreamReading:
        """Read a pass, from a place on. The first `skip` samples come without data."""
        ...

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


FIRST = 6


class FirstSamples:
    """A data set of one sample, which has the first ones of a stream, read anew at every look: are
    they the same each time? What a stream draws, it draws once for all serves of a sample, and a
    resumed pass would read others."""

    def __init__(self, source: StreamSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> list[Any]:
        reading = self.source.begin(StreamTurn(0, 0, False, 0, 1))
        samples: list[Any] = []
        try:
            while len(samples) < FIRST:
                samples.append(self.source.decode(next(reading)))
        except StopIteration:
            pass  # a stream may have fewer
        finally:
            reading.close()
        return samples
