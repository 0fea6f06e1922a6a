"""The views of a serve: what each augmentation makes of the pictures in their slots.

    augment=[a, a]       one augmentation, two draws        batch: [[view 0, view 1], labels]
    augment=[a, b, c]    one draw for each augmentation     batch: [[a's, b's, c's], labels]

What goes with the pictures (`joint_parts`) is moved with each view of them, by the same draw.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.batching.joint_parts import JointPart, boxes_kind
from loaders.batching.user_views import RepetitionCheck
from loaders.blocks import Blocks
from loaders.errors import SampleShapeError
from loaders.pixels.augmentation import (
    Augmentation,
    Chain,
    Cropping,
    Draws,
    first_step,
    reads_slots,
    view_keys,
)
from loaders.pixels.moves import Moves, move_parts
from loaders.pixels.placing import Images, SlotPictures, picture_sizes
from loaders.slots.columns import ArrayColumn
from loaders.slots.leaves import as_kind, is_tv_tensor
from loaders.slots.slab import Slab


@dataclass(frozen=True, slots=True)
class ServedSlots:
    """The samples that are served, where they lie, and the keys of what is drawn for them."""

    slab: Slab
    slots: NDArray[np.int64]
    keys: NDArray[np.uint64]
    ids: NDArray[np.int64]
    serves: NDArray[np.int64] | None = None
    """Which of the crops in a slot are served, where it holds crops."""

    def only(self, which: slice | list[int]) -> "ServedSlots":
        """Some of them."""
        return ServedSlots(self.slab, self.slots[which], self.keys[which], self.ids[which])


class BatchedView:
    """One view, made by an augmentation of whole batches."""

    def __init__(self, augment: Augmentation, number: int) -> None:
        self.augment = augment
        self.number = number
        self._check = RepetitionCheck(augment, "let it draw from `draws` alone")

    def draws(self, keys: NDArray[np.uint64]) -> Draws:
        """The random numbers of this view. `keys` are those of the serves."""
        return Draws(view_keys(keys, self.number))

    def pictures(self, images: Images, keys: NDArray[np.uint64]) -> torch.Tensor:
        if reads_slots(self.augment):
            return self.augment(cast(Any, images), self.draws(keys))
        images = images.gather() if isinstance(images, SlotPictures) else images
        return self._check.call(lambda pixels: self.augment(pixels, self.draws(keys)), images)

    def apply(
        self, images: Images, keys: NDArray[np.uint64], ids: NDArray[np.int64]
    ) -> tuple[torch.Tensor, Moves]:
        """The pictures of the samples `ids`, and how they moved. The augmentation must be ours."""
        sizes, chain = picture_sizes(images), self.augment
        if not isinstance(chain, Chain):
            chain = Chain([cast(Any, chain)])
        pictures, placings = chain.apply(images, self.draws(keys))
        return pictures, Moves(ids, sizes, placings)


class SlotViews:
    """All views of a serve, made out of the slots of a slab. Workers' threads call it."""

    def __init__(
        self,
        augments: Sequence[Augmentation],
        several: bool,
        parts: Sequence[JointPart],
        blocks: Blocks,
    ) -> None:
        """`several`: whether a batch has a list of views, or the only one as it is. `parts` go with
        the picture: then all of `augments` must be ours."""
        self._views = [BatchedView(augment, n) for n, augment in enumerate(augments)]
        self._several = several
        self._parts = tuple(parts)
        self._blocks = blocks

    @property
    def first_steps(self) -> list[Cropping] | None:
        """What decides which box of a picture each view shows. None: all of it may be seen."""
        firsts = [first for view in self._views if (first := first_step(view.augment))]
        return firsts if len(firsts) == len(self._views) else None

    def going_with(self, parts: Sequence[JointPart]) -> "SlotViews":
        """The same views of samples in which other parts go with the picture."""
        other = copy.copy(self)
        other._parts = tuple(parts)
        return other

    def columns(self, served: ServedSlots) -> dict[int, Any]:
        """The columns of a batch that are augmented, by their numbers."""
        made: list[dict[int, torch.Tensor]] = []
        for view in self._views:
            pictures, moves = self._make_view(view, served)
            by_number = {served.slab.picture_number: pictures}
            for part in self._parts if moves is not None else ():
                moved = _moved(part, served, cast(Moves, moves))
                by_number[part.number] = self._stacked(moved, part, served.ids)
            made.append(by_number)
        if not self._several:
            return made[0]
        return {number: [of_view[number] for of_view in made] for number in made[0]}

    def samples(self, samples: Sequence[Any], served: ServedSlots) -> list[Any]:
        """The single samples of these slots, with what is augmented in place of what they have."""
        slab, count = served.slab, len(served.slots)
        assert slab.picture is not None
        together = slab.picture.has_one_size(served.slots)
        rows = [slice(None)] if together else [slice(n, n + 1) for n in range(count)]
        changed: list[Any] = []
        for row in rows:
            views = [self._leaves(view, served.only(row)) for view in self._views]
            for n, sample in enumerate(samples[row]):
                leaves = slab.nest.leaves(sample)
                for number in views[0]:
                    made = [view[number][n] for view in views]
                    leaves[number] = made if self._several else made[0]
                changed.append(slab.nest.sample(leaves))
        return changed

    def _make_view(
        self, view: BatchedView, served: ServedSlots
    ) -> tuple[torch.Tensor, Moves | None]:
        # An augmentation may write into the pictures, so each view gets its own.
        images, keys = self._pictures(served, view.number), served.keys
        if self._parts:
            return view.apply(images, keys, served.ids)
        return view.pictures(images, keys), None

    def _pictures(self, served: ServedSlots, view: int) -> Images:
        """Where the pictures lie, if a kernel can read them there, else a copy."""
        picture = served.slab.picture
        assert picture is not None
        gather = partial(picture.gather, served.slots, self._blocks)
        at = picture.pictures(served.slots, served.serves, view)
        return gather() if at is None else SlotPictures(*at, self._blocks, gather)

    def _leaves(self, view: BatchedView, served: ServedSlots) -> dict[int, list[Any]]:
        """The augmented leaves of each sample, as the data set returns such leaves."""
        pictures, moves = self._make_view(view, served)
        by_number: dict[int, list[Any]] = {served.slab.picture_number: list(pictures.unbind())}
        if moves is not None:
            by_number |= {part.number: _moved(part, served, moves) for part in self._parts}
        for number, leaves in by_number.items():
            column = _arrays(served.slab, number)
            for n, slot in enumerate(served.slots.tolist()):
                leaves[n] = _in_form(leaves[n], column, slot, moves, n)
        return by_number

    def _stacked(
        self, parts: Sequence[torch.Tensor], part: JointPart, ids: NDArray[np.int64]
    ) -> torch.Tensor:
        first = parts[0]
        for other, sample_id in zip(parts, ids.tolist(), strict=True):
            if other.shape != first.shape:
                raise SampleShapeError(
                    f"part {part.place} is {tuple(first.shape)} in sample {ids[0]} and"
                    f" {tuple(other.shape)} in sample {sample_id}, which are no batch: give a"
                    " collate function; or let the data set fill every sample up with zeros"
                )
        memory = self._blocks.array((len(parts) * first.nbytes,), np.dtype(np.uint8))
        out = torch.from_numpy(memory).view(first.dtype).view(len(parts), *first.shape)
        return torch.stack(list(parts), out=out)


class DeviceViews:
    """All views of a serve, made of a batch of pictures on the training device."""

    def __init__(self, augments: Sequence[Augmentation], several: bool) -> None:
        self._views = [BatchedView(augment, n) for n, augment in enumerate(augments)]
        self._several = several

    def __call__(self, images: torch.Tensor, keys: NDArray[np.uint64]) -> Any:
        if not self._several:
            return self._views[0].augment(images, self._views[0].draws(keys))
        return [view.augment(images.clone(), view.draws(keys)) for view in self._views]


def _moved(part: JointPart, served: ServedSlots, moves: Moves) -> list[torch.Tensor]:
    """This part of each sample, moved with its picture."""
    column, slots = _arrays(served.slab, part.number), served.slots.tolist()
    for n, slot in enumerate(slots):
        attributes = column.forms.attributes_at(slot)
        if "canvas_size" in attributes:
            moves.check_size(n, tuple(attributes["canvas_size"]), f"part {part.place}")
        if "format" in attributes and boxes_kind(attributes["format"], part.place) != part.kind:
            raise SampleShapeError(
                f"part {part.place} of sample {moves.ids[n]} has the format"
                f" {attributes['format'].name}, and others are {part.kind}: return boxes of one"
            )
    return move_parts(part.kind, [column.leaf(slot) for slot in slots], moves, part.place)


def _in_form(
    leaf: torch.Tensor, column: ArrayColumn, slot: int, moves: Moves | None, n: int
) -> Any:
    """A moved leaf as the data set returns it: an array, or a tensor of torchvision's."""
    if isinstance(column.forms.template, np.ndarray) and moves is not None:
        return leaf.numpy()
    if not is_tv_tensor(column.forms.kind):
        return leaf
    attributes = column.forms.attributes_at(slot)
    if "canvas_size" in attributes and moves is not None:
        attributes["canvas_size"] = moves.size(n)
    return as_kind(leaf, column.forms.kind, attributes)


def _arrays(slab: Slab, number: int) -> ArrayColumn:
    column = slab.columns[number]
    assert isinstance(column, ArrayColumn)  # `joint_parts` and `picture_number` name no other
    return column
