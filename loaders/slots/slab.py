"""The slab: one preallocated row of slots for decoded samples, with exact byte accounting.

The leaves of the first sample decide the slab's columns. An array leaf becomes memory for `slots`
arrays like it, in its own memory layout (a channels_last picture stays channels_last). A slot
usually lies in its row of that memory. There are three exceptions:

    row   |  slot 0  |  slot 1  |  slot 2  |  slot 3  |      the template's size: the usual case
             as is     smaller:    larger:     lent: it points into the decoded cache, nothing
                       fits in     memory of   is copied
                       the row     its own

Where a user's collate function gets single samples, one may be nested otherwise than the template:
None, or without some key. It is kept in a slab of its own, of one slot.

Different threads may write to different slots at the same time. The memory that larger slots have
for themselves is counted; growing past `limit_bytes` is an error, and never happens silently.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.slots.columns import Allowance, Arrays, Objects
from loaders.slots.crop_rows import CropLayout, CropRows
from loaders.slots.leaves import (
    Nest,
    Sample,
    as_tensor,
    holds_numbers,
    is_tv_tensor,
    leaves_of,
    nested_otherwise,
    picture_number,
    structure_of,
)


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
        """`decoded` are columns that exist already, with a row for each sample. Then the slab only
        points there. `varies`: whether samples may be nested otherwise than the template. `crops`:
        what slots hold in place of the picture."""
        number = picture_number(template)
        self.picture_number = -1 if number is None else number
        """The number of the leaf that is augmented. -1: there is no picture."""
        self.nest = Nest(template)
        self.slots = slots
        self._already_decoded = decoded is not None
        self.varies = varies
        self._structure = structure_of(template)
        self._odd: dict[int, Slab] = {}
        """The samples that are nested otherwise, by their slots."""
        allowance = self._allowance = Allowance(limit_bytes)
        self.columns: list[Arrays | Objects] = []
        for number, leaf in enumerate(leaves_of(template)):
            value = as_tensor(leaf)
            if isinstance(value, torch.Tensor):
                there = None if decoded is None else decoded[number]
                held = crops if number == self.picture_number else None
                self.columns.append(Arrays(leaf, value, slots, number, allowance, there, held))
            else:
                self.columns.append(Objects(slots))
        there = None if self.picture_number < 0 else self.columns[self.picture_number]
        self.picture = there if isinstance(there, Arrays) else None

    @property
    def batches_by_kind(self) -> bool:
        """Whether only torch's own stacking knows the class of a batch: some leaf is a tensor of a
        user's subclass. (Torchvision's become plain tensors.)"""
        kinds = [c.kind for c in self.columns if isinstance(c, Arrays)]
        return any(kind is not None and not is_tv_tensor(kind) for kind in kinds)

    @property
    def interleaved(self) -> bool:
        """Whether pictures lie in memory as rows of pixels, which is how decoders write them."""
        return self.picture is not None and self.picture.order == [1, 2, 0]

    @property
    def crops(self) -> CropRows | None:
        """What slots hold in place of pictures. None: they hold pictures."""
        return self.picture.crops if self.picture else None

    @property
    def nbytes(self) -> int:
        if self._already_decoded:
            return 0
        odd = sum(one.nbytes for one in list(self._odd.values()))
        return odd + sum(column.nbytes for column in self.columns if isinstance(column, Arrays))

    def fits(self, sample: Sample) -> bool:
        """Whether a sample is nested as the template is, with numbers where that has numbers."""
        if structure_of(sample) != self._structure:
            return False
        leaves = zip(self.columns, leaves_of(sample), strict=True)
        return all(isinstance(column, Arrays) == holds_numbers(leaf) for column, leaf in leaves)

    def picture_in(self, sample: Sample) -> tuple[Nest, int]:
        """The nest of a sample that came from here, and the number of its picture. -1: it has
        none."""
        if not self.varies or self.fits(sample):
            return self.nest, self.picture_number
        number = picture_number(sample)
        return Nest(sample), -1 if number is None else number

    def leaves_like_template(self, sample: Sample, sample_id: int) -> list[Any]:
        """The leaves of a sample, which must be nested as the template is."""
        if structure_of(sample) != self._structure:
            raise nested_otherwise(sample, sample_id, self.nest.template)
        return leaves_of(sample)

    def write(self, slot: int, sample: Sample, sample_id: int) -> None:
        """Copy a decoded sample into `slot`."""
        self.write_leaves(slot, self.leaves_like_template(sample, sample_id), sample_id)

    def write_leaves(self, slot: int, leaves: Sequence[Any], sample_id: int) -> None:
        """Copy the leaves of a sample into `slot`, except those that were decoded there."""
        self._forget_odd(slot)
        for column, leaf in zip(self.columns, leaves, strict=True):
            column.write(slot, leaf, sample_id)

    def write_rows(
        self, slots: Sequence[int], nest: Sample, columns: Sequence[torch.Tensor | list[Any]]
    ) -> bool:
        """Copy samples that are nested like `nest` into their slots, all at once. Returns whether
        that was possible: they must be as large as the template is."""
        if structure_of(nest) != self._structure or self._already_decoded:
            return False
        both: list[tuple[Arrays, torch.Tensor | list[Any]]] = []
        for column, rows in zip(self.columns, columns, strict=True):
            if not isinstance(column, Arrays) or not column.takes_rows(slots, rows):
                return False
            both.append((column, rows))
        for slot in slots:
            self._forget_odd(slot)
        for column, rows in both:
            column.write_rows(slots, rows)
        return True

    def lend(self, slot: int, leaves: Sequence[Any], sample_id: int) -> None:
        """Let `slot` point to `leaves`, which are not copied and must never be written to."""
        self._forget_odd(slot)
        for column, leaf in zip(self.columns, leaves, strict=True):
            column.lend(slot, leaf, sample_id)

    def leaves(self, slot: int) -> list[Any]:
        """The leaves in `slot`: tensors over its memory, and objects."""
        return [column.at(slot) for column in self.columns]

    def sample(self, slot: int) -> Sample:
        """A copy of the sample in `slot`, as the data set returned it."""
        if (one := self._odd.get(slot)) is not None:
            return one.sample(0)
        return self.nest.sample([column.copy(slot) for column in self.columns])

    def keep_odd(self, slot: int, sample: Sample, sample_id: int) -> None:
        """Keep a sample that does not fit, in memory of its own."""
        self._forget_odd(slot)
        one = Slab(sample, 1)
        self._allowance.take(one.nbytes, one.nbytes)
        one.write(0, sample, sample_id)
        self._odd[slot] = one

    def odd(self, slots: NDArray[np.int64]) -> "dict[int, Slab]":
        """Those of these slots whose samples are nested otherwise, by their numbers in `slots`:
        each as a slab of one slot."""
        if not self._odd:
            return {}
        return {n: self._odd[slot] for n, slot in enumerate(slots.tolist()) if slot in self._odd}

    def _forget_odd(self, slot: int) -> None:
        if self._odd and (one := self._odd.pop(slot, None)) is not None:
            self._allowance.take(-one.nbytes, 0)

    def with_picture(
        self, nested: Any, change: Callable[[Any], Any], nest: Callable[[Sequence[Any]], Any]
    ) -> Any:
        """A sample or a batch with its picture replaced by `change(picture)`. `nest` is the
        function of `self.nest` that builds it: `sample` or `batch`."""
        leaves = self.nest.leaves(nested)
        leaves[self.picture_number] = change(leaves[self.picture_number])
        return nest(leaves)
