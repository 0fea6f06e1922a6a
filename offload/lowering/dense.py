"""Values that are all of their buffer: the only ones that may take another's place.

    [0 1 2 3 4 5]   size (2, 3), stride (3, 1) or (1, 2): whole    stride (4, 1), offset 1: not

Then whatever is done to the value is done to the buffer, and nobody sees the rest of it.
"""

from offload.kernels import Value


def whole(value: Value, nbytes: int) -> bool:
    """The value is every byte of a buffer of `nbytes`, each once."""
    expected = 1
    for size, stride in sorted(zip(value.size, value.stride, strict=True), key=lambda d: d[::-1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return value.offset == 0 and expected * value.dtype.itemsize == nbytes
