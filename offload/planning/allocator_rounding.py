"""How much of a CUDA device PyTorch's caching allocator takes for what is asked of it. Pure.

    a piece    <= 1 MiB   < 10 MiB   more
    a segment     2 MiB     20 MiB   the next multiple of 2 MiB

A budget is bytes of the device, so what a plan needs outside of its arena is counted in segments.
The sizes of the pieces are unknown, so the result is rather too large than too small.
"""

MIB = 1 << 20
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, STEP = MIB, 2 * MIB, 20 * MIB, 2 * MIB


def taken(nbytes: int) -> int:
    """The bytes that the allocator takes for pieces of `nbytes` together."""
    if nbytes <= 0:
        return 0
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return max(LARGE_SEGMENT, -(-nbytes // STEP) * STEP)


def outside(most: int, fixed: int) -> int:
    """The bytes that it takes outside of the arena.

    `most`: what one kernel allocates and frees; `fixed`: what libraries keep. The arena is rounded
    up, too, and small tensors that a step returns need a segment."""
    return taken(most) + taken(fixed) + STEP + SMALL_SEGMENT
