"""A sample's leaves as one run of bytes, and back without a copy; and the index of such records.

    leaves   [tensor [3, H, W] over HWC memory, 7, float32 array]
    bytes    |h w c h w c ...          |..|float32 ...|     each array at a multiple of 64 bytes,
    layout   [["tensor", "uint8", [3, H, W], [1, 2, 0]], null, ["array", "<f4", ...]]    in its own
    values   [7]                                                                 order of dimensions

The index of a writer's records begins with a header line; it appends a line for every event:

    crc TAB header TAB version TAB fingerprint
    crc TAB record TAB sample TAB offset TAB bytes TAB crc of bytes TAB layout TAB values
    crc TAB drop   TAB writer TAB offset                    that record of this writer is bad

Each begins with the crc32 of its rest. A damaged line loses only its own record, and an incomplete
last line is ignored.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.errors import CacheError

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
        if layout is None and (layout := _parse(text)):
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


def _parse(text: str) -> RecordLayout | None:
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


VERSION = 1


@dataclass(frozen=True, slots=True)
class RecordLine:
    """The record of a sample begins at `offset` of the writer's data."""

    sample_id: int
    offset: int
    nbytes: int
    crc: int
    layout: str
    values: str

    def encoded(self) -> bytes:
        head = f"record\t{self.sample_id}\t{self.offset}\t{self.nbytes}\t{self.crc:08x}"
        return encoded_line(f"{head}\t{self.layout}\t{self.values}")


@dataclass(frozen=True, slots=True)
class DropLine:
    """The record at `offset` of `writer`'s data is bad."""

    writer: int
    offset: int

    def encoded(self) -> bytes:
        return encoded_line(f"drop\t{self.writer}\t{self.offset}")


def record_line(sample_id: int, offset: int, crc: int, packed: Packed) -> RecordLine:
    layout, values = packed.layout, values_to_text(packed.values)
    return RecordLine(sample_id, offset, layout.nbytes, crc, layout.text, values)


def header_line(fingerprint: str) -> bytes:
    return encoded_line(f"header\t{VERSION}\t{fingerprint}")


def encoded_line(body: str) -> bytes:
    data = body.encode("ascii")
    return b"%08x\t%s\n" % (zlib.crc32(data), data)


@dataclass(slots=True)
class IndexReader:
    """Reads an index that may be growing. Every complete line is read once."""

    path: Path
    fingerprint: str
    position: int = 0
    """It has been read up to this byte."""
    damaged: int = 0
    """The number of lines whose checksum is wrong."""
    _end: int = 0

    def find_end(self) -> bool:
        """Look up the size of the index; returns whether there is more to read. Map the data after
        this call: then they include the records of these lines."""
        self._end = self.path.stat().st_size
        return self._end > self.position

    def read_new_lines(self) -> Iterator[RecordLine | DropLine]:
        """The lines up to where `find_end` found the end. CacheError: this is another index."""
        with self.path.open("rb") as file:
            file.seek(self.position)
            for line in file:
                end = self.position + len(line)
                if end > self._end or not line.endswith(b"\n"):
                    return
                if self.position == 0:
                    _check_header(self.path, line[:-1], self.fingerprint)
                elif parsed := _parse_line(line[:-1]):
                    yield parsed
                else:
                    self.damaged += 1
                self.position = end


def _fields(line: bytes) -> list[str] | None:
    crc, _, body = line.partition(b"\t")
    if crc != b"%08x" % zlib.crc32(body):
        return None
    return body.decode("ascii").split("\t")


def _check_header(path: Path, line: bytes, fingerprint: str) -> None:
    fields = _fields(line)
    if fields is None or fields[0] != "header":
        raise CacheError(f"{path} is damaged at its beginning: delete the folder {path.parent}")
    if fields[1] != str(VERSION):
        raise CacheError(
            f"{path} was written in format {fields[1]}, this version reads {VERSION}: delete the"
            f" folder {path.parent} or give another cache folder"
        )
    if fields[2:] != [fingerprint]:
        raise CacheError(
            f"{path} is a cache of {fields[2:]}, not of {fingerprint}: somebody moved it there;"
            f" delete the folder {path.parent}"
        )


def _parse_line(line: bytes) -> RecordLine | DropLine | None:
    match _fields(line):
        case ["record", sample_id, offset, nbytes, crc, layout, values]:
            place = int(sample_id), int(offset), int(nbytes), int(crc, 16)
            return RecordLine(*place, layout, values)
        case ["drop", writer, offset]:
            return DropLine(int(writer), int(offset))
    return None
