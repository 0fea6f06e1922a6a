"""The loops over pixels: crop, resize, mirror and hole, a whole batch in one call.

    picture --box--> (two rows -> one row) x H --> (two pixels -> one pixel) x W --> out[i]

`csrc/pictures.c` does it at the speed of memory; where that was not compiled, torch does the same
(`moving`), with a warning. Both give the same bits on every machine, because the arithmetic is in
integers.

Along an axis, output d lies at `place = (d + 1/2) * scale - 1/2`, clipped to the pixels, in 32.32
fixed point. Its value comes from the pixels a and b around it, with w = the fraction * 127,
rounded: `a * (127 - w) + b * w`, times 258, divided by 2^15 and rounded (a division by 127). First
the rows are blended, to uint8, then the pixels of each row. Where an axis shrinks by 2 or more, its
pixels are first replaced by the rounded means of k = floor(scale) neighbours (a rest of less than k
at the end is left out), or fine patterns would become coarse ones.
"""

import ctypes
import functools
import importlib.util
import shutil
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.pixels.crops import Box
from loaders.pixels.moving import moved

LONGEST = 1 << 24  # the longest side; the sum of more pixels might not fit into 32 bits

Integers = NDArray[np.int32]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Pictures:
    """Where n pictures lie in memory. They are uint8 [height, width, channels], contiguous."""

    addresses: NDArray[np.uintp]  # first byte of each
    heights: Integers
    widths: Integers
    channels: int
    owner: object  # keeps the memory alive while a kernel reads

    def __post_init__(self) -> None:
        count = len(self.addresses)
        _check("addresses", self.addresses, np.uintp, (count,))
        _check("heights", self.heights, np.int32, (count,))
        _check("widths", self.widths, np.int32, (count,))
        if self.channels < 1:
            raise ValueError(f"pictures have {self.channels} channels: give at least 1")
        sides = np.stack([self.heights, self.widths])
        wrong = ((sides < 1) | (sides > LONGEST)).any(0) | (self.addresses == 0)
        if wrong.any():
            n = int(wrong.argmax())
            raise ValueError(
                f"picture {n} is {self.heights[n]}x{self.widths[n]} at address"
                f" {self.addresses[n]:#x}: give a picture that exists, with sides of 1 to {LONGEST}"
            )

    def __len__(self) -> int:
        return len(self.addresses)


def compiled() -> bool:
    """Whether the kernels were compiled at installation. Without that, torch does it slowly."""
    return not isinstance(kernel_library(), str)


def resized_crop(
    pictures: Pictures,
    boxes: Integers,
    flips: NDArray[np.bool_] | Pixels,
    holes: Integers | None,
    out: Pixels,
) -> None:
    """Resize box i (top, left, height, width) of picture i to fill out[i], mirror it if flips[i],
    and zero hole i, a box in the output that may reach over the edge. Any thread may call this."""
    _check("boxes", boxes, np.int32, (len(pictures), 4))
    top, left, height, width = boxes.T
    # (The sum top + height may be more than an int32 holds.)
    inside = (top <= pictures.heights - height) & (left <= pictures.widths - width)
    inside &= (boxes >= (0, 0, 1, 1)).all(1)
    if not inside.all():
        n = int(inside.argmin())
        raise ValueError(
            f"box {n} (top {top[n]}, left {left[n]}, height {height[n]}, width {width[n]}) is not"
            f" inside its picture of {pictures.heights[n]}x{pictures.widths[n]}: clip it"
        )
    if _run("pictures_resized_crop", pictures, boxes, flips, holes, out):
        raise MemoryError("there is no memory for a few rows of pixels: use less memory elsewhere")


def fit(picture: Pixels, boxes: Sequence[Box], out: Pixels) -> None:
    """`resized_crop` for boxes of one contiguous picture, at a tenth of its fixed costs."""
    height, width, channels = picture.shape
    for top, left, tall, wide in boxes:
        inside = top >= 0 and left >= 0 and tall > 0 and wide > 0
        if not inside or top + tall > height or left + wide > width:
            box = (top, left, tall, wide)
            raise ValueError(f"box {box} is not inside its picture of {height}x{width}: clip it")
    library, count = kernel_library(), len(boxes)
    _check("picture", picture, np.uint8, picture.shape)
    _check("out", out, np.uint8, (count, *out.shape[1:3], channels))
    at = np.array([address(picture)] * count, dtype=np.uintp)
    if isinstance(library, str):
        heights, widths = (np.full(count, side, dtype=np.int32) for side in (height, width))
        pictures = Pictures(at, heights, widths, channels, picture)
        each = np.array(boxes, dtype=np.int32)
        resized_crop(pictures, each, np.zeros(count, dtype=bool), None, out)
        return
    sides = [height] * count + [width] * count + [0] * count
    numbers = np.array([*sides, *chain.from_iterable(boxes)], dtype=np.int32)
    first, step = address(numbers), 4 * count
    batch = _KernelBatch(
        *out.shape, address(at), first, first + step, first + 2 * step, None, address(out),
        _portable(),
    )  # fmt: skip
    if library.pictures_resized_crop(ctypes.byref(batch), ctypes.c_void_p(first + 3 * step)):
        raise MemoryError("there is no memory for a few rows of pixels: use less memory elsewhere")


def window(
    pictures: Pictures,
    corners: Integers,
    flips: NDArray[np.bool_] | Pixels,
    holes: Integers | None,
    out: Pixels,
) -> None:
    """Copy the window of out's size at corner i (top, left) of picture i to out[i], mirror it if
    flips[i], then zero hole i. Where the window reaches over the picture's edge, it is zero."""
    _check("corners", corners, np.int32, (len(pictures), 2))
    _run("pictures_window", pictures, corners, flips, holes, out)


def _run(
    kernel: str,
    pictures: Pictures,
    boxes: Integers,
    flips: NDArray[np.bool_] | Pixels,
    holes: Integers | None,
    out: Pixels,
) -> int:
    """Check the rest of a batch, and run a kernel on it, or torch."""
    count = len(pictures)
    _check("flips", flips, np.bool_ if flips.dtype == np.bool_ else np.uint8, (count,))
    if holes is not None:
        _check("holes", holes, np.int32, (count, 4))
    if out.ndim != 4 or 0 in out.shape[1:3] or not out.flags.writeable:
        raise ValueError(f"out is {out.shape}: make it a writable [n, height, width, channels]")
    _check("out", out, np.uint8, (count, *out.shape[1:3], pictures.channels))
    library = kernel_library()
    if isinstance(library, str):
        _warn_of_torch(library)
        _run_torch(pictures, boxes, flips, holes, out, resized=kernel == "pictures_resized_crop")
        return 0
    batch = _KernelBatch(
        *out.shape,
        address(pictures.addresses),
        address(pictures.heights),
        address(pictures.widths),
        address(flips),
        None if holes is None else address(holes),
        address(out),
        _portable(),
    )
    return getattr(library, kernel)(ctypes.byref(batch), ctypes.c_void_p(address(boxes)))


def _check(
    what: str, array: NDArray[np.generic], dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    if array.dtype == dtype and array.shape == shape and array.flags.c_contiguous:
        return
    layout = "" if array.flags.c_contiguous else " with gaps"
    raise ValueError(
        f"{what} is {array.dtype} {array.shape}{layout}: a kernel needs contiguous"
        f" {np.dtype(dtype)} {shape}"
    )


class _KernelBatch(ctypes.Structure):
    """The same fields as `struct batch` of csrc/pictures.c."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("pictures", ctypes.c_void_p),
        ("heights", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("flips", ctypes.c_void_p),
        ("holes", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("portable", ctypes.c_int32),
    )


def address(array: NDArray[np.generic]) -> int:
    return array.__array_interface__["data"][0]


def _portable() -> bool:
    """Whether kernels use only what all processors have. Tests replace this function."""
    return False


@functools.cache
def kernel_library() -> ctypes.CDLL | str:
    """The compiled kernels, or the reason why there are none."""
    built = importlib.util.find_spec("loaders.pixels._pictures")
    if built is None or built.origin is None:
        return _why_not_built(Path(__file__).parents[2])
    try:
        library = ctypes.CDLL(built.origin)  # it releases the GIL during a call
    except OSError as error:
        return f"they cannot be loaded ({error}); {_BUILD}"
    for kernel in (library.pictures_resized_crop, library.pictures_window):
        kernel.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        kernel.restype = ctypes.c_int
    return library


_BUILD = (
    "build them by: pip install -e . --no-deps -v (in the checkout; it shows the compiler's errors)"
)


def _why_not_built(root: Path) -> str:
    """Return what can be known of why there is no library below `root`, and what builds one."""
    others = sorted(path.name for path in (root / "loaders/pixels").glob("_pictures.*.so"))
    if others:
        return f"they were built for another Python ({', '.join(others)}); {_BUILD}"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if not any(map(shutil.which, (compiler, "gcc", "clang"))):
        return f"there is no C compiler: install gcc or clang, then {_BUILD}"
    if (root / "pyproject.toml").is_file() and not [*root.glob("perfect_training.egg-info")]:
        return f"this checkout was not built; {_BUILD}"
    return f"when this package was installed, a C compiler was missing or failed; {_BUILD}"


@functools.cache
def _warn_of_torch(reason: str) -> None:
    """Warn once a process, because a cached call is not made again."""
    warnings.warn(
        f"pictures are cropped by torch, many times slower than by the compiled kernels: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )


# ---- without them -------------------------------------------------------------------------------


def _run_torch(
    pictures: Pictures,
    boxes: Integers,
    flips: NDArray[np.bool_] | Pixels,
    holes: Integers | None,
    out: Pixels,
    resized: bool,
) -> None:
    for n in range(len(pictures)):
        row, size = slice(n, n + 1), (out.shape[1], out.shape[2])
        shape = (int(pictures.heights[n]), int(pictures.widths[n]), pictures.channels)
        memory = (ctypes.c_uint8 * prod(shape)).from_address(int(pictures.addresses[n]))
        pixels = torch.from_numpy(np.ctypeslib.as_array(memory).reshape(1, *shape))
        hole = None if holes is None else holes[row]
        made = moved(pixels, boxes[row], size, resized, flips[row].astype(bool), hole)
        out[n] = made[0].numpy()
