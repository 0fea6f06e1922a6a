"""The arrays of some samples in memory that two processes map, and the samples as a few bytes.

    staging   | which sample is at work | picture | picture | ... |   it only ever grows

A staging area is a nameless file in memory: no kill leaves anything in /dev/shm, whose size is no
limit. One process writes the arrays of a chunk, each in its own layout, and the other reads them.
Small samples that are alike (plain tensors and numbers) lie in rows, one array for each leaf.
"""

import os
import pickle
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from mmap import mmap
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, cast, overload

import numpy as np
import torch
from PIL import Image

from loaders.errors import LoaderError
from loaders.slots.leaves import (
    Nest,
    Picture,
    Sample,
    as_kind,
    as_tensor,
    change_leaves,
    kind_of,
    leaves_of,
    mode_of,
    structure_of,
)

FIRST_BYTES = 1 << 16
ALIGNMENT = 64
PROGRESS = struct.Struct("q")
IDLE = -1


@dataclass(frozen=True, slots=True)
class Staged:
    """An array leaf in the staging area: where it lies, and how its memory is arranged."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    """The size of each dimension, from the outermost in memory to the innermost."""
    back: tuple[int, ...]
    """The place of each dimension of the leaf among `sizes`."""
    start: int
    mode: str | None
    """The mode of the PIL picture that it was. None: it was another kind of array."""
    kind: type[torch.Tensor] | None = None
    """The subclass of torch.Tensor that it is, and its attributes. None: it is none."""
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    of_numpy: bool = False
    """Whether it is an array of numpy's."""

    def view(self, area: mmap) -> torch.Tensor | np.ndarray[Any, Any]:
        """The leaf over the area, without a copy. It changes with the next chunk."""
        count = int(np.prod(self.sizes, dtype=np.int64))
        if count:
            memory = torch.frombuffer(area, dtype=self.dtype, count=count, offset=self.start)
        else:
            memory = torch.empty(0, dtype=self.dtype)
        leaf = memory.view(self.sizes).permute(self.back)
        if self.of_numpy:
            return leaf.numpy()
        if self.mode is not None:
            leaf = leaf.as_subclass(Picture)
            leaf.picture_mode = self.mode
        return as_kind(leaf, self.kind, self.attributes)


class Staging:
    """The staging area as the child sees it, which writes to it."""

    def __init__(self) -> None:
        self._file = _nameless_file()
        self._end = 0
        self._told = 0
        self.area = self._grow(FIRST_BYTES)
        self.begin()

    def begin(self) -> None:
        """Begin a new chunk, whose arrays overwrite those of the chunk before."""
        self._end = PROGRESS.size
        self.note(IDLE)

    def note(self, number: int) -> None:
        """Note which sample is being read, so that the parent can name one that kills."""
        PROGRESS.pack_into(self.area, 0, number)

    def place(self, leaf: Any) -> Any:
        """Copy a leaf into the area if it is an array. Any other leaf is returned as it is."""
        array = isinstance(leaf, torch.Tensor | np.ndarray | Image.Image)
        value = as_tensor(leaf) if array else None
        if not isinstance(value, torch.Tensor):
            return leaf
        outer_first = sorted(range(value.ndim), key=lambda d: -value.stride(d))
        staged = Staged(
            value.dtype,
            tuple(value.shape[d] for d in outer_first),
            tuple(outer_first.index(d) for d in range(value.ndim)),
            -(-self._end // ALIGNMENT) * ALIGNMENT,
            mode_of(leaf),
        )
        kind = kind_of(leaf)
        self._reach(staged.start + value.numel() * value.element_size())
        cast(torch.Tensor, staged.view(self.area)).copy_(value)
        if isinstance(leaf, np.ndarray):
            return replace(staged, of_numpy=True)
        return staged if kind is None else replace(staged, kind=kind, attributes={**vars(leaf)})

    def rows_like(self, leaf: torch.Tensor, most: int) -> tuple[torch.Tensor, Staged]:
        """Room for `most` rows like a contiguous tensor: as a tensor, and where it lies."""
        sizes = (most, *leaf.shape)
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._reach(start + most * leaf.numel() * leaf.element_size())
        staged = Staged(leaf.dtype, sizes, tuple(range(len(sizes))), start, None)
        return cast(torch.Tensor, staged.view(self.area)), staged

    def _reach(self, end: int) -> None:
        self._end = end
        if end > len(self.area):
            self.area = self._grow(max(end, 2 * len(self.area)))

    @property
    def grown_bytes(self) -> int:
        """The size of the area, if it is new or grew since it was sent. Else 0."""
        return len(self.area) if self._told != len(self.area) else 0

    def send(self, pipe: Connection, pid: int) -> None:
        """Send the area's descriptor to the process `pid`."""
        self._told = len(self.area)
        reduction.send_handle(pipe, self._file, pid)

    def close(self) -> None:
        os.close(self._file)

    def _grow(self, size: int) -> mmap:
        os.ftruncate(self._file, size)
        return mmap(self._file, size)

    def pack(self, sample: Sample, sample_id: int) -> bytes:
        """A sample without its arrays, which lie in the area then."""
        nest = change_leaves(sample, self.place)
        try:
            return pickle.dumps(nest, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise LoaderError(
                f"sample {sample_id} holds something that cannot leave its process: {error}; return"
                " tensors, arrays, pictures, numbers and strings, or decode in threads"
            ) from error


def unpack(packed: bytes, area: mmap) -> Sample:
    """The sample, with its arrays over the area: they change with the next chunk."""
    return change_leaves(
        pickle.loads(packed), lambda leaf: leaf.view(area) if isinstance(leaf, Staged) else leaf
    )


def mapped(pipe: Connection, area_bytes: int) -> mmap:
    """The other process's area, whose descriptor comes next in the pipe."""
    descriptor = reduction.recv_handle(pipe)
    try:
        return mmap(descriptor, area_bytes)
    finally:
        os.close(descriptor)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("perfect-staging")
        os.fchmod(file, 0o600)
        return file
    with tempfile.TemporaryFile() as named:
        return os.dup(named.fileno())


NUMBERS = (int, float, bool)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows on their way to the other process."""

    nest: Sample
    """The nest of a sample, without its leaves."""
    columns: list[Staged | list[Any]]
    count: int

    def unpacked(self, area: mmap) -> "RowSamples":
        views = [c.view(area) if isinstance(c, Staged) else c for c in self.columns]
        return RowSamples(self.nest, [view[: self.count] for view in views])


class RowSamples(Sequence[Sample]):
    """The samples of some rows. They lie in memory that the next chunk overwrites."""

    def __init__(self, nest: Sample, columns: list[Any]) -> None:
        self.nest = nest
        self.columns = columns
        """For each leaf its rows: a tensor, or a list of numbers."""

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, at: int) -> Sample: ...
    @overload
    def __getitem__(self, at: slice) -> list[Sample]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        return Nest(self.nest).sample([column[at] for column in self.columns])


def as_rows(samples: Sequence[Sample]) -> Sequence[Sample]:
    """These samples as rows, if they are alike; else as they are."""
    if len(samples) < 2 or not RowsBeingWritten.suit(samples[0]):
        return samples
    structure = structure_of(samples[0])
    if any(structure_of(sample) != structure for sample in samples):
        return samples
    columns: list[Any] = []
    for leaves in zip(*map(leaves_of, samples), strict=True):
        if len({(type(leaf), getattr(leaf, "shape", None)) for leaf in leaves}) > 1:
            return samples
        if type(leaves[0]) is not torch.Tensor:
            columns.append(list(leaves))
        elif all(leaf.dtype == leaves[0].dtype and _is_plain(leaf) for leaf in leaves):
            columns.append(torch.stack(leaves))
        else:
            return samples
    return RowSamples(change_leaves(samples[0], lambda _: None), columns)


class RowsBeingWritten:
    """The rows of a chunk of at most `most` samples like `sample`."""

    def __init__(self, staging: Staging, sample: Sample, most: int) -> None:
        self.count = 0
        self._nest = change_leaves(sample, lambda _: None)
        self._structure = structure_of(sample)
        self._flat = type(sample) is tuple and self._structure == (None,) * len(sample)
        self._kinds = [type(leaf) for leaf in leaves_of(sample)]
        self._columns: list[Staged | list[Any]] = []
        self._rows: list[Any] = []
        for leaf in leaves_of(sample):
            rows, column = staging.rows_like(leaf, most) if _is_plain(leaf) else ([], [])
            self._rows.append(rows)
            self._columns.append(rows if isinstance(rows, list) else column)

    @staticmethod
    def suit(sample: Sample) -> bool:
        """Whether samples like this one can lie in rows."""
        leaves = leaves_of(sample)
        return bool(leaves) and all(type(leaf) in NUMBERS or _is_plain(leaf) for leaf in leaves)

    def put(self, sample: Sample) -> bool:
        """Write the next row, if the sample is like the first one."""
        if self._flat and type(sample) is tuple and len(sample) == len(self._kinds):
            leaves = sample
        elif structure_of(sample) == self._structure:
            leaves = leaves_of(sample)
        else:
            return False
        for leaf, kind, rows in zip(leaves, self._kinds, self._rows, strict=True):
            if type(leaf) is not kind:
                return False
            if kind is torch.Tensor and not (
                leaf.shape == rows.shape[1:] and leaf.dtype == rows.dtype and _is_plain(leaf)
            ):
                return False
        for leaf, rows in zip(leaves, self._rows, strict=True):
            if isinstance(rows, list):
                rows.append(leaf)
            else:
                rows[self.count] = leaf
        self.count += 1
        return True

    def packed(self) -> PackedRows:
        return PackedRows(self._nest, self._columns, self.count)


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.is_contiguous()
