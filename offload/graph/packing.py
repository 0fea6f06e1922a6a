"""Places blocks of known lifetimes side by side: a layout that is made once, for all. Pure."""

from collections.abc import Sequence


def pack_blocks(blocks: Sequence[tuple[int, int, int]], alignment: int) -> tuple[int, ...]:
    """The offset of each block of (bytes, begin, end). Blocks that live at once lie apart. The
    largest are placed first."""
    offsets = [0] * len(blocks)
    placed: list[tuple[int, int, int, int]] = []
    for number in sorted(range(len(blocks)), key=lambda n: (-blocks[n][0], n)):
        nbytes, begin, end = blocks[number]
        offset = 0
        for low, high, first, last in sorted(placed):
            if first < end and begin < last:
                if offset + nbytes <= low:
                    break
                offset = max(offset, -(-high // alignment) * alignment)
        placed.append((offset, offset + nbytes, begin, end))
        offsets[number] = offset
    return tuple(offsets)
