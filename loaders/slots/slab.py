"""The slab: one preallocated row of slots for decoded samples, with exact byte accounting.

The leaves of the first sample decide the slab's columns. An array leaf becomes memory for `slots`
arrays in its own memory layout; arrays of another size are kept as `slot_rows` shows. A sample that
is nested unlike the template, for a user's collate function, is kept in a slab of one slot.

Different threads may write to different slots at the same time. All memory is counted; growing past
`limit_bytes` is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.slots.columns import ArrayColumn, ObjectColumn
from loaders.slots.leaves import (
    Nest,
    Sample,
    as_tensor,
    holds_numbers,
    is_tv_tensor,
    leaves_of,
    nesting_error,
    picture_number,
    structure_of,
)
from loaders.slots.slot_rows import ByteBudget, CropLayout, CropRows


class Slab:
    """`slots` places for samples like `template`."""

    def __init__(
        self,
        template: Sample,
        slots: int,
        limit_bytes: int | None = None,
        decoded: Sequence[torch.Tensor] | None = None,
        varies: bool = False,
        crops: CropLayout | None = None,
    ) -> None:
        """`decoded` are existing columns with a row for each sample, to which the slab points.
        `varies`: whether samples may be nested unlike the template. `crops`: what slots hold in
        place of the picture."""
        number = picture_number(template)
        self.picture_number = -1 if number is None else number
        """The number of the leaf that is augmented. -1: there is no picture."""
        self.nest = Nest(template)
        self.slots = slots
        self._already_decoded = decoded is not None
        self.varies = varies
        self._structure = structure_of(template)
        self._unlike: dict[int, Slab] = {}
        """The samples that are nested unlike the template, by their slots."""
        budget = self._budget = ByteBudget(limit_bytes)
        self.columns: list[ArrayColumn | ObjectColumn] = []
        for number, leaf in enumerate(leaves_of(template)):
            value = as_tensor(leaf)
            if isinstance(value, torch.Tensor):
                rows = None if decoded is None else decoded[number]
                layout = crops if number == self.picture_number else None
                column = ArrayColumn(leaf, value, slots, number, budget, rows, layout)
            else:
                column = ObjectColumn(slots)
            self.columns.append(column)
        picture = None if self.picture_number < 0 else self.columns[self.picture_number]
        self.picture = picture if isinstance(picture, ArrayColumn) else None

    @property
    def needs_torch_collate(self) -> bool:
        """Whether torch must collate, because some leaf is a tensor of a user's subclass."""
        kinds = [c.forms.kind for c in self.columns if isinstance(c, ArrayColumn)]
        return any(kind is not None and not is_tv_tensor(kind) for kind in kinds)

    @property
    def interleaved(self) -> bool:
        """Whether pictures are rows of pixels in memory, as decoders write them."""
        return self.picture is not None and self.picture.order == [1, 2, 0]

    @property
    def crops(self) -> CropRows | None:
        """The crops that slots hold in place of pictures. None: they hold pictures."""
        return self.picture.crops if self.picture else None

    @property
    def nbytes(self) -> int:
        if self._already_decoded:
            return 0
        unlike = sum(slab.nbytes for slab in list(self._unlike.values()))
        arrays = [column for column in self.columns if isinstance(column, ArrayColumn)]
        return unlike + sum(column.nbytes for column in arrays)

    def fits(self, sample: Sample) -> bool:
        """Whether a sample is nested as the template is, with numbers where that has numbers."""
        if structure_of(sample) != self._structure:
            return False
        leaves = zip(self.columns, leaves_of(sample), strict=True)
        return all(
            isinstance(column, ArrayColumn) == holds_numbers(leaf) for column, leaf in leaves
        )

    def nest_and_picture(self, sample: Sample) -> tuple[Nest, int]:
        """The nest of a sample from this slab, and the number of its picture. -1: it has none."""
        if not self.varies or self.fits(sample):
            return self.nest, self.picture_number
        number = picture_number(sample)
        return Nest(sample), -1 if number is None else number

    def matching_leaves(self, sample: Sample, sample_id: int) -> list[Any]:
        """The leaves of a sample, which must be nested as the template is."""
        if structure_of(sample) != self._structure:
            raise nesting_error(sample, sample_id, self.nest.template)
        return leaves_of(sample)

    def write(self, slot: int, sample: Sample, sample_id: int) -> None:
        """Copy a decoded sample into `slot`."""
        self.write_leaves(slot, self.matching_leaves(sample, sample_id), sample_id)

    def write_leaves(self, slot: int, leaves: Sequence[Any], sample_id: int) -> None:
        """Copy the leaves of a sample into `slot`, except those that were decoded there."""
        self._forget_unlike(slot)
        for column, leaf in zip(self.columns, leaves, strict=True):
            column.write(slot, leaf, sample_id)

    def write_rows(
        self, slots: Sequence[int], nest: Sample, columns: Sequence[torch.Tensor | list[Any]]
    ) -> bool:
        """Copy samples that are nested like `nest` into their slots, all at once. Returns whether
        that was possible: they must be as large as the template is."""
        if structure_of(nest) != self._structure or self._already_decoded:
            return False
        pairs: list[tuple[ArrayColumn, torch.Tensor | list[Any]]] = []
        for column, rows in zip(self.columns, columns, strict=True):
            if not isinstance(column, ArrayColumn) or not column.accepts_rows(slots, rows):
                return False
            pairs.append((column, rows))
        for slot in slots:
            self._forget_unlike(slot)
        for column, rows in pairs:
            column.write_rows(slots, rows)
        return True

    def lend(self, slot: int, leaves: Sequence[Any], sample_id: int) -> None:
        """Let `slot` point to `leaves`, which are not copied and must never be written to."""
        self._forget_unlike(slot)
        for column, leaf in zip(self.columns, leaves, strict=True):
            column.lend(slot, leaf, sample_id)

    def leaves(self, slot: int) -> list[Any]:
        """The leaves in `slot`: views of its memory, and objects."""
        return [column.leaf(slot) for column in self.columns]

    def sample(self, slot: int) -> Sample:
        """A copy of the sample in `slot`, as the data set returned it."""
        if (slab := self._unlike.get(slot)) is not None:
            return slab.sample(0)
        return self.nest.sample([column.copy(slot) for column in self.columns])

    def keep_unlike(self, slot: int, sample: Sample, sample_id: int) -> None:
        """Keep a sample that is nested unlike the template, in a slab of one slot."""
        self._forget_unlike(slot)
        slab = Slab(sample, 1)
        self._budget.reserve(slab.nbytes, slab.nbytes)
        slab.write(0, sample, sample_id)
        self._unlike[slot] = slab

    def unlike(self, slots: NDArray[np.int64]) -> "dict[int, Slab]":
        """The samples in these slots that are nested unlike the template, by their numbers in
        `slots`: each as a slab of one slot."""
        if not self._unlike:
            return {}
        held = self._unlike
        return {n: held[slot] for n, slot in enumerate(slots.tolist()) if slot in held}

    def _forget_unlike(self, slot: int) -> None:
        if self._unlike and (slab := self._unlike.pop(slot, None)) is not None:
            self._budget.reserve(-slab.nbytes, 0)

    def with_picture(
        self, nested: Any, change: Callable[[Any], Any], nest: Callable[[Sequence[Any]], Any]
    ) -> Any:
        """A sample or batch with its picture replaced; `nest` is `nest.sample` or `nest.batch`."""
        leaves = self.nest.leaves(nested)
        leaves[self.picture_number] = change(leaves[self.picture_number])
        return nest(leaves)
