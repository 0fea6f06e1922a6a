"""A sample's leaves as one run of bytes, and back without a copy.

    leaves   [tensor [3, H, W] over HWC memory, 7, float32 array]
    bytes    |h w c h w c ...          |..|float32 ...|     each array at a multiple of 64 bytes,
    layout   [["tensor", "uint8", [3, H, W], [1, 2, 0]], null, ["array", "<f4", ...]]    in its own
    values   [7]                                                                 order of dimensions

Arrays come back as views of the bytes, in their shape and order of dimensions; gaps and repeated
elements are not kept. Plain values are kept as text.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 64
PLAIN = (bool, int, float, str, type(None))
Kind = Literal["tensor", "array", "scalar"]


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Window:
    """The place of an array in a record, and its type and shape."""

    kind: Kind
    dtype: Any  # torch.dtype of a tensor, np.dtype of the other kinds
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The strides, counted in elements."""
    start: int
    nbytes: int

    def view_in(self, memory: torch.Tensor, at: int) -> Any:
        """The array in the record that begins at byte `at` of `memory` (uint8, one dimension)."""
        start = at + self.start
        if self.kind == "tensor":
            if not self.nbytes:
                return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
            if self.dtype is torch.uint8:
                return memory.as_strided(self.shape, self.strides, start)
            row = memory[start : start + self.nbytes].view(self.dtype)
            return row.as_strided(self.shape, self.strides)
        strides = tuple(stride * self.dtype.itemsize for stride in self.strides)
        source = memory.numpy() if self.nbytes else None
        array = np.ndarray(self.shape, self.dtype, source, start if self.nbytes else 0, strides)
        array.setflags(write=False)
        return array[()] if self.kind == "scalar" else array


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The places of the leaves in a record. Samples of one shape share a layout."""

    text: str
    windows: tuple[Window | None, ...]
    """One for each leaf. None: the leaf is a plain value, which is kept in the index."""
    nbytes: int


@dataclass(slots=True)
class RecordLayouts:
    """Keeps every layout once, however many records have it. Any thread may call `parse`."""

    known: dict[str, RecordLayout] = field(default_factory=dict)

    def parse(self, text: str) -> RecordLayout | None:
        """The layout that `text` describes. None: this torch or numpy lacks one of its types."""
        layout = self.known.get(text)
        if layout is None and (layout := _parsed(text)):
            layout = self.known.setdefault(text, layout)
        return layout


@dataclass(frozen=True, slots=True)
class Packed:
    """A sample that goes into a cache. `rows` are its arrays as bytes; dense ones are no copies."""

    layout: RecordLayout
    values: tuple[Any, ...]
    rows: tuple[NDArray[np.uint8], ...]

    def rows_by_start(self) -> list[tuple[int, NDArray[np.uint8]]]:
        """The rows that are not empty, each with its start in the record."""
        starts = [window.start for window in self.layout.windows if window]
        return [(start, row) for start, row in zip(starts, self.rows, strict=True) if len(row)]

    def crc(self) -> int:
        """The crc32 of the record, with the zeros between its arrays."""
        crc = end = 0
        for start, row in self.rows_by_start():
            crc = zlib.crc32(row.data, zlib.crc32(bytes(start - end), crc))
            end = start + len(row)
        return crc


def pack(leaves: Sequence[Any], layouts: RecordLayouts) -> Packed | None:
    """The leaves as a record. None: a leaf is neither a CPU array nor a plain value."""
    specs: list[tuple[Kind, str, list[int], list[int]] | None] = []
    values: list[Any] = []
    rows: list[NDArray[np.uint8]] = []
    for leaf in leaves:
        if type(leaf) in (*PLAIN, bytes):
            specs.append(None)
            values.append(leaf)
        elif isinstance(leaf, torch.Tensor) and _is_plain_tensor(leaf):
            tensor = leaf.detach().resolve_conj().resolve_neg()
            # (`tensor` may have lost the order of an expanded leaf.)
            order = _outer_first(leaf.stride())
            memory = tensor.permute(order).contiguous().as_strided((tensor.numel(),), (1,))
            specs.append(("tensor", str(leaf.dtype)[len("torch.") :], list(leaf.shape), order))
            rows.append(memory.view(torch.uint8).numpy())
        elif _is_plain_array(leaf):
            array = np.asarray(leaf)
            order = _outer_first([abs(stride) for stride in array.strides])
            memory = np.ascontiguousarray(array.transpose(order)).reshape(-1)
            kind = "scalar" if isinstance(leaf, np.generic) else "array"
            specs.append((kind, array.dtype.str, list(array.shape), order))
            rows.append(memory.view(np.uint8))
        else:
            return None
    layout = layouts.parse(json.dumps(specs))
    return Packed(layout, tuple(values), tuple(rows)) if layout else None


def unpack(memory: torch.Tensor, at: int, layout: RecordLayout, values: Sequence[Any]) -> list[Any]:
    """The leaves of the record that begins at byte `at`. Nobody may write to its arrays."""
    plain = iter(values)
    return [next(plain) if w is None else w.view_in(memory, at) for w in layout.windows]


def values_to_text(values: Sequence[Any]) -> str:
    if not values:
        return "[]"
    plain = [{"bytes": v.decode("latin-1")} if type(v) is bytes else v for v in values]
    return json.dumps(plain)


def values_from_text(text: str) -> tuple[Any, ...]:
    if text == "[]":
        return ()
    return tuple(v["bytes"].encode("latin-1") if type(v) is dict else v for v in json.loads(text))


def _parsed(text: str) -> RecordLayout | None:
    windows: list[Window | None] = []
    end = 0
    for spec in json.loads(text):
        if spec is None:
            windows.append(None)
            continue
        kind, name, shape, order = spec
        dtype = getattr(torch, name, None) if kind == "tensor" else np.dtype(name)
        if not isinstance(dtype, torch.dtype | np.dtype):
            return None
        strides = [1] * len(shape)
        for outer, inner in reversed([*pairwise(order)]):
            strides[outer] = strides[inner] * max(shape[inner], 1)
        nbytes = prod(shape) * dtype.itemsize
        start = aligned(end) if nbytes else end
        windows.append(Window(kind, dtype, tuple(shape), tuple(strides), start, nbytes))
        end = start + nbytes
    return RecordLayout(text, tuple(windows), end)


def _outer_first(strides: Sequence[int]) -> list[int]:
    """The dimensions, from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda d: -strides[d])


def _is_plain_tensor(leaf: torch.Tensor) -> bool:
    dense = leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized
    return dense and leaf.device.type == "cpu"


def _is_plain_array(leaf: Any) -> bool:
    if type(leaf) not in (np.ndarray, np.memmap) and not isinstance(leaf, np.generic):
        return False
    # The type is kept by its name, which does not describe objects, named fields and types of
    # extensions.
    dtype = leaf.dtype
    if dtype.kind not in "biufcmMSU" or not dtype.itemsize:
        return False
    return np.dtype(dtype.str) == dtype
