"""Finds values that fill their whole buffer. Only these may take another value's place.

    [0 1 2 3 4 5]   size (2, 3), stride (3, 1) or (1, 2): whole    stride (4, 1), offset 1: not

Whatever is done to such a value is done to the buffer, which holds nothing else.
"""

from offload.program.kernels import Value


def whole(value: Value, nbytes: int) -> bool:
    """Whether the value covers every byte of a buffer of `nbytes` exactly once."""
    expected = 1
    for size, stride in sorted(zip(value.size, value.stride, strict=True), key=lambda d: d[::-1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return value.offset == 0 and expected * value.dtype.itemsize == nbytes
