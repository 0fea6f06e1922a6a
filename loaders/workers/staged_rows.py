"""Samples that are alike, as rows: one array for each leaf, in place of an array a sample.

A small sample takes longer to be packed, sent and unpacked than to be read. So samples of plain
tensors and numbers that look like the first one of their chunk go through the area as rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any, overload

import torch

from loaders.slots.leaves import Nest, Sample, change_leaves, leaves_of, structure_of
from loaders.workers.staging import Staged, Staging

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
