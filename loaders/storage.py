"""The slab: one preallocated row of slots for decoded samples, with exact byte accounting.

A sample is any nest of tuples, lists and dicts. Its leaves decide the slab's columns once, from the
first sample: tensors, arrays and pictures become one preallocated tensor [slots, ...] each, in the
layout the sample has (a channels_last picture stays channels_last), numbers likewise, anything else
(strings, ...) a list. A later sample of another shape is an error, never a silent reallocation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders.errors import SampleShapeError

# A sample is whatever the user's data set returns: only its leaves have types here.
Sample = Any
Leaf = torch.Tensor | object
Column = torch.Tensor | list[object]


Nest = Callable[[Sequence[Any]], Any]


def flatten(sample: Sample) -> tuple[list[Any], Nest, object]:
    """The leaves of a nested sample, how to nest as many values the same way, and its structure."""
    if isinstance(sample, dict):
        keys = sorted(sample, key=repr)  # two samples may list their keys in another order
        leaves, nest, inner = flatten([sample[key] for key in keys])

        def nest_dict(values: Sequence[Any]) -> Any:
            by_key = dict(zip(keys, nest(values), strict=True))
            return {key: by_key[key] for key in sample}

        return leaves, nest_dict, (*keys, inner)
    if not isinstance(sample, tuple | list):
        return [sample], lambda values: values[0], None
    parts = [flatten(part) for part in sample]
    sizes = [len(leaves) for leaves, _, _ in parts]

    def nest_parts(values: Sequence[Any]) -> Any:
        nested, start = [], 0
        for (_, nest, _), size in zip(parts, sizes, strict=True):
            nested.append(nest(values[start : start + size]))
            start += size
        # As torch's default collate does: a namedtuple stays one, a tuple becomes a list.
        return type(sample)(*nested) if hasattr(sample, "_fields") else nested

    leaves = [leaf for part, _, _ in parts for leaf in part]
    return leaves, nest_parts, tuple(inner for _, _, inner in parts)


def as_tensor(leaf: Any) -> Leaf:
    """The tensor that a leaf is stored as; a leaf that is no number stays what it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if isinstance(leaf, Image.Image):
        pixels = torch.from_numpy(np.array(leaf))
        return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels[None]
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc":
        return torch.as_tensor(leaf)
    if type(leaf) is float:
        return torch.tensor(leaf, dtype=torch.float64)
    if type(leaf) in (bool, int):
        return torch.tensor(leaf)
    return leaf


class Slab:
    """`slots` places for samples shaped like `template`."""

    def __init__(self, template: Sample, slots: int) -> None:
        leaves, self._nest, self._structure = flatten(template)
        self.slots = slots
        self._columns: list[Column] = [_column(as_tensor(leaf), slots) for leaf in leaves]

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self._columns if isinstance(c, torch.Tensor))

    def write(self, slot: int, sample: Sample, sample_id: int) -> None:
        """Copy a decoded sample into `slot`. Different slots may be written by different
        threads."""
        leaves, _, structure = flatten(sample)
        if structure != self._structure:
            raise SampleShapeError(
                f"sample {sample_id} is nested otherwise than the first one (parts {structure}, not"
                f" {self._structure}): every sample needs the same structure"
            )
        for number, (column, leaf) in enumerate(zip(self._columns, leaves, strict=True)):
            value = as_tensor(leaf)
            if isinstance(column, list):
                column[slot] = leaf
                continue
            if not isinstance(value, torch.Tensor) or value.shape != column.shape[1:]:
                got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(leaf).__name__
                raise SampleShapeError(
                    f"part {number} of sample {sample_id} is {got}, the first one was"
                    f" {tuple(column.shape[1:])}: slots have one size; resize in the data set"
                )
            if value.dtype != column.dtype:
                raise SampleShapeError(
                    f"part {number} of sample {sample_id} is {value.dtype}, the first one was"
                    f" {column.dtype}: slots have one type"
                )
            column[slot].copy_(value)

    def gather(self, slots: NDArray[np.int64], pin_memory: bool) -> list[Any]:
        """The columns of a batch: copies, so that the slots may be refilled at once."""
        rows = torch.from_numpy(slots)
        return [
            _take(column, rows, pin_memory)
            if isinstance(column, torch.Tensor)
            else [column[slot] for slot in slots.tolist()]
            for column in self._columns
        ]

    def nest(self, columns: Sequence[Any]) -> Any:
        """The batch, nested as a sample is."""
        return self._nest(columns)


def _column(leaf: Leaf, slots: int) -> Column:
    if not isinstance(leaf, torch.Tensor):
        return list[object]([None] * slots)
    # Dimensions from the outermost in memory to the innermost: the slab keeps the sample's layout.
    outer_first = sorted(range(leaf.ndim), key=lambda d: -leaf.stride(d))
    memory = torch.empty((slots, *(leaf.shape[d] for d in outer_first)), dtype=leaf.dtype)
    back = [outer_first.index(d) + 1 for d in range(leaf.ndim)]
    return memory.permute(0, *back)


def _take(column: torch.Tensor, rows: torch.Tensor, pin_memory: bool) -> torch.Tensor:
    # Gathers along whole rows of memory, whatever the order of the dimensions in the view.
    outer_first = sorted(range(1, column.ndim), key=lambda d: -column.stride(d))
    memory = column.permute(0, *outer_first)
    out = torch.empty((len(rows), *memory.shape[1:]), dtype=column.dtype, pin_memory=pin_memory)
    torch.index_select(memory, 0, rows, out=out)
    back = [outer_first.index(d) + 1 for d in range(1, column.ndim)]
    return out.permute(0, *back)
