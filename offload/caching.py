"""What PyTorch's caching allocator takes of a CUDA device for what is asked of it. Pure.

    a piece    <= 1 MiB   < 10 MiB   more
    a segment     2 MiB     20 MiB   the next multiple of 2 MiB

A budget is of the device, so what a plan needs outside of its arena counts by segment: in pieces of
unknown sizes, hence rather too much than too little.
"""

MIB = 1 << 20
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, STEP = MIB, 2 * MIB, 20 * MIB, 2 * MIB


def taken(nbytes: int) -> int:
    """For pieces of so many bytes together."""
    if nbytes <= 0:
        return 0
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return max(LARGE_SEGMENT, -(-nbytes // STEP) * STEP)


def outside(most: int, fixed: int) -> int:
    """`most`: what one kernel allocates, which is gone with it; `fixed`: what libraries keep. The
    arena is rounded up, and small things that a step returns need a segment."""
    return taken(most) + taken(fixed) + STEP + SMALL_SEGMENT
