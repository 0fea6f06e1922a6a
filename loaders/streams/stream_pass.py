"""One pass of a stream while it is read: raw samples get their positions, and wait for workers.

    source ---- one thread at a time reads on ----> kept raw samples ----> taken by workers
                 ^                                    (a few batches)
                 '-- a worker wants position p, or the order asks whether there is one

Nothing is read ahead of that. An error of the source is kept: whoever asks for what lies behind it
gets it again, so it arrives at the same batch for any number of workers.
"""

import logging
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.errors import PassEnded, SourceError, StateError

log = logging.getLogger(__name__)

STRIDE = 8
"""Two places that are kept for states lie at least so many positions apart."""


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
    """Where reading may go on with this sample. None: reading cannot begin with it."""
    mark: str = ""
    """Another sample at its position would have another mark. Empty: it has none."""


StreamReading = Generator[RawSample]
"""The raw samples of one pass. Whoever leaves it early closes it, which lets go of files."""


@dataclass(frozen=True, slots=True)
class MarkedStretch:
    """The marks of some raw samples that follow each other, as a digest."""

    first: int
    last: int
    digest: int
    end: int | None = None
    """So many samples the pass has. None: that was not known."""

    @classmethod
    def from_marks(cls, marks: list[tuple[int, str]], end: int | None) -> "MarkedStretch":
        digest = 0
        for position, mark in marks:
            digest = _with_mark(digest, position, mark)
        return cls(marks[0][0], marks[-1][0], digest, end)


class StreamTrail:
    """What saved states need of the samples that were read last: places where reading may go on,
    and marks, which tell whether a resumed pass reads the same samples again."""

    def __init__(self, name: str, length: int, expected: MarkedStretch | None = None) -> None:
        """`name` is that of the pass. It ends no more than `length` positions back. `expected`:
        what the run read that saved a state."""
        self._name = name
        self._expected = expected
        self._digest = 0
        """Of the marks of the expected stretch, as far as it was read."""
        self._places: deque[tuple[int, Place]] = deque(maxlen=length // STRIDE + 2)
        self._marks: deque[tuple[int, str]] = deque(maxlen=length)

    def note(self, position: int, raw: RawSample) -> None:
        """Note a sample that was read. It is an error if it is not the expected one."""
        apart = not self._places or position >= self._places[-1][0] + STRIDE
        if apart and raw.place is not None:
            self._places.append((position, raw.place))
        if raw.mark:
            self._marks.append((position, raw.mark))
            if self._expected is not None:
                self._compare(self._expected, position, raw)

    def state(self, oldest: int, end: int | None) -> dict[str, Any]:
        """What a saved state has of a pass that will be read again from sample `oldest` on: the
        latest kept place up to there, and the marks from there on. `end`: where the pass ends."""
        places = (each for each in reversed(self._places) if each[0] <= oldest)
        position, place = next(places, (0, None))
        marks = [each for each in self._marks if each[0] >= oldest]
        stretch = asdict(MarkedStretch.from_marks(marks, end)) if marks else None
        return {"oldest": oldest, "position": position, "place": place, "marks": stretch}

    def check_end(self, end: int) -> None:
        """Refuse a pass that ends before what is expected."""
        if self._expected is not None and end <= self._expected.last:
            raise self._error(
                f"it ends before sample {end} here, sample {self._expected.last} was read there"
            )

    def _compare(self, expected: MarkedStretch, position: int, raw: RawSample) -> None:
        if expected.end is not None and position >= expected.end:
            raise self._error(f"it ended before sample {expected.end} there")
        if not expected.first <= position <= expected.last:
            return
        self._digest = _with_mark(self._digest, position, raw.mark)
        if position == expected.last and self._digest != expected.digest:
            raise self._error(
                f"samples {expected.first} to {expected.last} differ, the last one is {raw.name}"
                " here"
            )

    def _error(self, why: str) -> StateError:
        return StateError(
            f"the samples of {self._name} are others than in the run that saved the state ({why}):"
            " give the stream of that run, whose samples are a function of the pass; to go on with"
            " what is here nevertheless, take 'marks' out of state['stream']"
        )


@dataclass(eq=False)
class StreamPass:
    """The raw samples of one pass of one rank, by their positions. Several threads use it."""

    reading: StreamReading
    next: int
    """The position of its next sample."""
    promised: int | None
    """The pass has so many samples, and ends there. None: as many as there are."""
    name: str
    """What errors call it."""
    trail: StreamTrail
    ends_there: bool = False
    """Whether the source itself promises so many samples, so a warning says if it has more."""

    def __post_init__(self) -> None:
        self._kept: dict[int, RawSample] = {}
        self._end: int | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._closer = weakref.finalize(self, self.reading.close)
        self._closer.atexit = False  # a worker may be reading then

    @property
    def samples(self) -> int | None:
        """So many samples the pass has. None: it is not known yet."""
        return self.promised if self._end is None else self._end

    def skip_to(self, position: int) -> None:
        """Pass over the samples before this position, of which `reading` gives no data."""
        with self._lock:
            while self.next < position and self._end is None:
                if next(self.reading, None) is None:
                    self._note_end()
                else:
                    self.next += 1

    def reaches(self, samples: int) -> bool:
        """Whether the pass has at least so many samples. It is read up to there."""
        with self._lock:
            return self._reads_to(samples)

    def take(self, position: int) -> RawSample | None:
        """The raw sample of this position, which is kept no longer. None: the pass has ended."""
        with self._lock:
            return self._kept.pop(position) if self._reads_to(position + 1) else None

    def look_at(self, position: int) -> RawSample | None:
        """The raw sample of a position that may still be taken. None: the pass has ended."""
        with self._lock:
            if self.promised is not None and position >= self.promised:
                return None
            return self._kept[position] if self._reads_to(position + 1) else None

    def forget(self, entered: int, residents: NDArray[np.int64]) -> None:
        """Keep of the positions before `entered` only those of `residents`."""
        with self._lock:
            gone = [p for p in self._kept if p < entered]
            for position in {*gone} - {*residents.tolist()}:
                del self._kept[position]

    def state(self, oldest: int) -> dict[str, Any]:
        """What a saved state has of a pass that will be read again from sample `oldest` on."""
        with self._lock:
            return self.trail.state(oldest, self._end)

    def close(self) -> None:
        """Let go of what the source has open. A thread that hangs in a read keeps it open until it
        returns, and then reads no further."""
        self._error = self._error or PassEnded("this pass of the stream was closed")
        if self._lock.acquire(blocking=False):
            try:
                self._kept.clear()
                self._closer()
            finally:
                self._lock.release()

    def _reads_to(self, samples: int) -> bool:
        while self.next < samples and self._end is None:
            if self._error is not None:
                raise self._error
            try:
                self._read()
            except BaseException as error:
                # A Ctrl-C may have cut a sample off: nobody may go on reading behind it.
                self._error = error
                raise
        return samples <= self.next

    def _read(self) -> None:
        assert self.next != self.promised, "nobody asks for more than was promised"
        try:
            raw = next(self.reading)
        except StopIteration:
            self._note_end()
            return
        self.trail.note(self.next, raw)
        self._kept[self.next] = raw
        self.next += 1
        if self.next == self.promised:
            if self.ends_there and next(self.reading, None) is not None:
                log.warning(
                    "%s has more samples than its len() says (%d on this rank): those are left out;"
                    " correct its len(), or give IterableSamples(..., samples=n)",
                    self.name, self.promised,
                )  # fmt: skip
            self._closer()

    def _note_end(self) -> None:
        self._closer()
        if self.promised is not None:
            who = "its len()" if self.ends_there else "samples="
            raise SourceError(
                f"{self.name} ended before sample {self.next}, but {who} promises"
                f" {self.promised}: give samples={self.next} times the number of ranks, or more"
            )
        self.trail.check_end(self.next)
        self._end = self.next


def _with_mark(digest: int, position: int, mark: str) -> int:
    return zlib.crc32(f"{position} {mark}".encode(), digest)
