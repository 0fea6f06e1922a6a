"""What is known of each byte of an arena, stored for ranges of bytes. Pure.

    begins    0        64            256                640
    known     | a      | b           | a                |

Each range ends where the next one begins. In all of it the same is known.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

Known = TypeVar("Known")


class ByteRanges(Generic[Known]):
    """What is known of each byte of an arena, stored for ranges in which it is the same."""

    def __init__(self, size: int, known: Known) -> None:
        self.size = size
        self.begins = [0]
        self.known = [known]

    def items(self, begin: int, end: int) -> Iterator[tuple[int, int, Known]]:
        """(begin, end, known) of the parts of a non-empty range, in order."""
        first, last = bisect_right(self.begins, begin) - 1, bisect_left(self.begins, end)
        for index in range(first, last):
            low = self.begins[index]
            high = self.begins[index + 1] if index + 1 < len(self.begins) else self.size
            yield max(low, begin), min(high, end), self.known[index]

    def cut(self, begin: int, end: int) -> range:
        """Cut at both ends, and return the numbers of the ranges that make up exactly this one."""
        return range(self._border(begin), self._border(end))

    def put(self, begin: int, end: int, known: Known) -> None:
        parts = self.cut(begin, end)
        self.begins[parts.start : parts.stop] = [begin]
        self.known[parts.start : parts.stop] = [known]

    def _border(self, at: int) -> int:
        index = bisect_left(self.begins, at)
        if at < self.size and (index == len(self.begins) or self.begins[index] != at):
            self.begins.insert(index, at)
            self.known.insert(index, self.known[index - 1])
        return index
