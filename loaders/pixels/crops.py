"""What the serves of a sample will show of its picture, known before the picture is decoded.

The union of the boxes of all serves is decoded, and no more; each box is then fitted into the
sample's slot. Where every box has twice the sides that it is fitted to, half the picture's size
shows as much, in other bits: so a decoder does it only if the user asks for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Box = tuple[int, int, int, int]
"""Top, left, height, width."""
Sides = tuple[int, int]
"""Height, width."""


@dataclass(frozen=True, slots=True)
class PicturePart:
    """Which part of a picture was decoded."""

    top: int
    left: int
    """The first two: in pixels as they were decoded."""
    height: int
    width: int
    """Of the whole picture, as it was stored, or resized."""
    eighths: int = 8
    """Of this size it was decoded at so many eighths."""


class Crops:
    """The crops of one sample: those of one serve, view by view, then those of the next one."""

    def __init__(self, boxes_in: Callable[[int, int], list[Box]], sizes: Sequence[Sides]) -> None:
        """`boxes_in` gives their boxes in a picture of some height and width. `sizes` are what the
        crops of each view are fitted to."""
        self.sizes = sizes
        self.part: PicturePart | None = None
        """What was decoded. None: the whole picture."""
        self._boxes_in = boxes_in
        self._known: tuple[int, int, list[Box]] | None = None

    def boxes(self, height: int, width: int) -> list[Box]:
        known = self._known
        if known is None or known[:2] != (height, width):
            known = self._known = height, width, self._boxes_in(height, width)
        return known[2]

    def union(self, height: int, width: int) -> Box:
        """The smallest box that holds them all."""
        boxes = self.boxes(height, width)
        top, left = min(box[0] for box in boxes), min(box[1] for box in boxes)
        bottom = max(box[0] + box[2] for box in boxes)
        right = max(box[1] + box[3] for box in boxes)
        return top, left, bottom - top, right - left

    def eighths(self, height: int, width: int) -> int:
        """The least of 1, 2, 4 or 8 eighths of the size that no crop has to be enlarged at."""
        boxes, views = self.boxes(height, width), len(self.sizes)
        shares = [
            min(box[2] / self.sizes[n % views][0], box[3] / self.sizes[n % views][1])
            for n, box in enumerate(boxes)
        ]
        return next(each for each in (1, 2, 4, 8) if each == 8 or min(shares) * each >= 8)


def scaled(box: Box, eighths: int) -> Box:
    """The pixels that hold this box in a picture at so many eighths of its size."""
    if eighths == 8:
        return box
    top, left, height, width = box
    first = top * eighths // 8, left * eighths // 8
    end = -(-(top + height) * eighths // 8), -(-(left + width) * eighths // 8)
    return *first, end[0] - first[0], end[1] - first[1]
