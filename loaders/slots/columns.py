"""The columns of a slab: one for each leaf of a sample, with a place for each slot.

ArrayColumn      arrays like the template's, in memory for all slots (`slot_rows`)
ObjectColumn     leaves that are no arrays
"""

from collections import UserList, deque
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from loaders.blocks import Blocks
from loaders.errors import SampleShapeError
from loaders.pixels.kernels import Pictures, address
from loaders.slots.leaves import (
    Leaf,
    as_kind,
    as_tensor,
    attributes_of,
    copy_object,
    copy_sample,
    kind_of,
    mode_of,
    restored,
)
from loaders.slots.slot_rows import Array, ByteBudget, CropLayout, CropRows, SlotRows

NUMBERS = MappingProxyType({int: torch.int64, float: torch.float64, bool: torch.bool})

COLLATED = (int, float, UserList, deque, range)
"""Torch makes tensors of these, even where the class is no plain number or list (an IntEnum)."""

# numpy lacks these types, so their bits are held as integers.
CARRIERS = (
    (torch.bfloat16, torch.int16),
    (torch.float8_e4m3fn, torch.int8),
    (torch.float8_e4m3fnuz, torch.int8),
    (torch.float8_e5m2, torch.int8),
    (torch.float8_e5m2fnuz, torch.int8),
)


class ObjectColumn:
    """A column of leaves that are neither arrays nor numbers."""

    def __init__(self, slots: int) -> None:
        self._objects: list[object] = [None] * slots

    def write(self, slot: int, leaf: object, sample_id: int) -> None:
        self._objects[slot] = copy_sample(leaf)  # the next read may overwrite its memory

    lend = write

    def leaf(self, slot: int) -> object:
        return self._objects[slot]

    def copy(self, slot: int) -> object:
        return copy_object(self._objects[slot])

    def gather(self, slots: NDArray[np.int64], blocks: Blocks) -> Any:
        """A list of copies. Numbers of a user's own classes become a tensor, as with torch."""
        made = [copy_object(self._objects[slot]) for slot in slots.tolist()]
        return default_collate(made) if all(isinstance(x, COLLATED) for x in made) else made


class LeafForms:
    """What the leaves of a column were besides their values: class, attributes, Pillow's mode."""

    def __init__(self, template: Any) -> None:
        self.template = template
        self.kind = kind_of(template)
        """The user's subclass of torch.Tensor. None: the leaves have none."""
        self._attributes: dict[int, dict[str, Any]] = {}
        self._mode = mode_of(template)
        self._modes: dict[int, str] = {}
        """The modes of those pictures whose mode is not that of the first one."""

    @property
    def are_plain(self) -> bool:
        return self.kind is None and self._mode is None

    def note(self, slot: int, leaf: Any) -> None:
        if self.kind is not None:
            self._attributes[slot] = {**attributes_of(leaf)}
        if self._mode is None:
            return
        mode = mode_of(leaf)
        if mode is None or mode == self._mode:
            self._modes.pop(slot, None)
        else:
            self._modes[slot] = mode

    def forget_mode(self, slot: int) -> None:
        self._modes.pop(slot, None)

    def attributes_at(self, slot: int) -> dict[str, Any]:
        return {**self._attributes.get(slot, {})}

    def restore(self, slot: int, stored: torch.Tensor) -> Any:
        """`stored` as what the leaf in `slot` was."""
        made = restored(self.template, stored, self._modes.get(slot, self._mode))
        return as_kind(made, self.kind, self.attributes_at(slot)) if self.kind else made


class ArrayColumn:
    """A column of array leaves of one type and one number of dimensions. Its memory has the
    template's dimensions from the outermost to the innermost; so have `shape` and rows."""

    def __init__(
        self,
        template: Any,
        value: torch.Tensor,
        slots: int,
        number: int,
        budget: ByteBudget,
        decoded: torch.Tensor | None = None,
        crops: CropLayout | None = None,
    ) -> None:
        """With `crops`, slots hold those, and what cannot be cropped has memory of its own."""
        self.forms = LeafForms(template)
        self.dtype = value.dtype
        # The data set's own columns may have gaps, or another order of dimensions than its samples
        # (torchvision's CIFAR10 has planes).
        strides = (value if decoded is None else decoded[0]).stride()
        self.order = sorted(range(value.ndim), key=lambda d: -strides[d])
        self.number = number
        example = self._carried(value)
        self.shape = example.shape
        self.crops = None if crops is None else CropRows(crops, slots)
        row = example.shape if crops is None else (0,) * example.ndim
        if decoded is not None:
            self.rows = SlotRows(self._carried(decoded, 1), example.shape, budget)
            return
        self.rows = SlotRows(np.empty((slots, *row), example.dtype), example.shape, budget)
        budget.reserve(self.nbytes, self.nbytes // slots)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (self.crops.memory.nbytes if self.crops else 0)

    def write(self, slot: int, leaf: Any, sample_id: int) -> None:
        if kind_of(leaf) is not self.forms.kind:
            raise SampleShapeError(
                f"part {self.number} of sample {sample_id} is a {type(leaf).__name__}, the first"
                f" one was a {type(self.forms.template).__name__}: return parts of one kind"
            )
        self.forms.note(slot, leaf)
        self._fill(slot, leaf, sample_id)

    def accepts_rows(self, slots: Sequence[int], rows: torch.Tensor | list[Any]) -> bool:
        """Whether these rows, one for each slot, fit as they are."""
        alike = self.forms.are_plain and self.crops is None
        if not alike or self.rows.is_elsewhere[slots].any():
            return False
        if isinstance(rows, list):
            return not self.shape and {NUMBERS[type(row)] for row in rows} == {self.dtype}
        sizes = rows.shape[1:]
        return (
            rows.dtype == self.dtype
            and len(sizes) == len(self.order)
            and tuple(sizes[d] for d in self.order) == self.shape
        )

    def write_rows(self, slots: Sequence[int], rows: torch.Tensor | list[Any]) -> None:
        self.rows.memory[slots] = rows if isinstance(rows, list) else self._carried(rows, 1)

    def _fill(self, slot: int, leaf: Any, sample_id: int) -> None:
        if not self.shape and type(leaf) in NUMBERS:
            if NUMBERS[type(leaf)] != self.dtype:
                raise self._type_error(NUMBERS[type(leaf)], sample_id)
            self.rows.memory[slot] = leaf
            return
        array = self._arranged(leaf, sample_id)
        if self.crops and (whole := self.crops.keep(slot, array)):
            self.rows.clear(slot, (*whole, array.shape[2]))
        elif address(array) != self.rows.addresses[slot]:  # otherwise it was decoded there
            np.copyto(self.rows.room(slot, array.shape), array)

    def lend(self, slot: int, leaf: Any, sample_id: int) -> None:
        self.forms.forget_mode(slot)
        array = self._arranged(leaf, sample_id) if self.shape else None
        if array is None or not array.flags.c_contiguous:
            self._fill(slot, leaf, sample_id)
        else:
            self.rows.point_to(slot, array)

    def leaf(self, slot: int) -> torch.Tensor:
        return self._uncarried(self._row(slot), 0)

    def copy(self, slot: int) -> Any:
        stored = self.leaf(slot).clone(memory_format=torch.preserve_format)
        return self.forms.restore(slot, stored)

    def has_one_size(self, slots: NDArray[np.int64]) -> bool:
        return bool((self.rows.sizes[slots] == self.rows.sizes[slots[:1]]).all())

    def gather(self, slots: NDArray[np.int64], blocks: Blocks) -> torch.Tensor:
        """A copy of these slots as a batch. The slots may be refilled at once."""
        sizes = self.rows.sizes[slots]
        if not (sizes == sizes[0]).all():
            odd = slots[np.flatnonzero((sizes != sizes[0]).any(axis=1))[0]]
            first, other = (tuple(self.leaf(int(s)).shape) for s in (slots[0], odd))
            raise SampleShapeError(
                f"part {self.number} is {first} in one sample of a batch and {other} in another:"
                " begin augment with RandomResizedCrop, give a collate function, or resize"
            )
        memory = self.rows.memory
        out = blocks.array((len(slots), *sizes[0].tolist()), memory.dtype)
        if not self.rows.is_elsewhere[slots].any() and self.crops is None:
            # With any mode but "raise", numpy writes straight into `out`.
            np.take(memory, slots, axis=0, out=out, mode="clip")
        else:
            for n, slot in enumerate(slots.tolist()):
                np.copyto(out[n], self._row(slot))
        return self._uncarried(out, 1)

    def pictures(
        self, slots: NDArray[np.int64], serves: NDArray[np.int64] | None = None, view: int = 0
    ) -> tuple[Pictures, int, NDArray[np.int32] | None] | None:
        """The pictures in memory, the number of planes of each, and the whole sizes of those of
        which only the crops of these `serves` are kept (zeros: it is whole; None: all are whole).
        None: the kernels cannot read them."""
        memory, sizes = self.rows.memory, self.rows.sizes[slots]
        if memory.dtype != np.uint8 or len(self.shape) != 3:
            return None
        if not memory.flags.c_contiguous or not sizes.all():
            return None
        whole_sizes = None
        addresses = self.rows.addresses[slots]
        if self.order == [1, 2, 0]:
            planes, channels = 1, self.shape[2]
            height, width = sizes[:, 0], sizes[:, 1]
            if not (sizes[:, 2] == channels).all():
                return None
            if self.crops and (cropped := self.crops.held[slots]).any():
                assert serves is not None
                tall, wide = self.crops.layout.sizes[view]
                at = self.crops.addresses(slots, serves, view)
                addresses = np.where(cropped, at, addresses)
                height, width = np.where(cropped, tall, height), np.where(cropped, wide, width)
                whole_sizes = np.where(cropped[:, None], sizes[:, :2], 0).astype(np.int32)
        elif self.order == [0, 1, 2]:
            # Each plane is a picture of one channel.
            planes, channels = self.shape[0], 1
            if not (sizes[:, 0] == planes).all():
                return None
            height, width = np.repeat(sizes[:, 1], planes), np.repeat(sizes[:, 2], planes)
            offset = np.arange(planes) * (sizes[:, 1] * sizes[:, 2])[:, None]
            addresses = (addresses[:, None] + offset).reshape(-1)
        else:
            return None
        elsewhere = slots[self.rows.is_elsewhere[slots]].tolist()
        owner = (memory, self.crops, [self.rows.row(slot) for slot in elsewhere])
        at = Pictures(
            addresses.astype(np.uintp), height.astype(np.int32), width.astype(np.int32),
            channels, owner,
        )  # fmt: skip
        return at, planes, whole_sizes

    def _arranged(self, leaf: Any, sample_id: int) -> Array:
        """A leaf as an array of this column's type and order of dimensions."""
        value: Leaf = as_tensor(leaf)
        if not isinstance(value, torch.Tensor) or value.ndim != len(self.order):
            here = tuple(value.shape) if isinstance(value, torch.Tensor) else type(leaf).__name__
            first = tuple(self.shape[self.order.index(d)] for d in range(len(self.shape)))
            raise SampleShapeError(
                f"part {self.number} of sample {sample_id} is {here}, the first was {first}: let"
                " the data set return parts of one kind"
            )
        if value.dtype != self.dtype:
            raise self._type_error(value.dtype, sample_id)
        return self._carried(value)

    def _type_error(self, dtype: torch.dtype, sample_id: int) -> SampleShapeError:
        return SampleShapeError(
            f"part {self.number} of sample {sample_id} is {dtype}, the first one was {self.dtype}:"
            " let the data set return parts of one type"
        )

    def _carried(self, value: torch.Tensor, lead: int = 0) -> Array:
        """The memory of a tensor as an array; `lead` dimensions of a batch come first."""
        for dtype, carrier in CARRIERS:
            if value.dtype == dtype:
                value = value.view(carrier)
        return value.permute([*range(lead), *(d + lead for d in self.order)]).numpy()

    def _uncarried(self, array: Array, lead: int) -> torch.Tensor:
        """A tensor with the dimensions of a sample, behind `lead` dimensions of a batch."""
        tensor = torch.from_numpy(array)
        for dtype, carrier in CARRIERS:
            if self.dtype == dtype:
                assert tensor.dtype == carrier
                tensor = tensor.view(dtype)
        back = [self.order.index(d) + lead for d in range(len(self.order))]
        return tensor.permute([*range(lead), *back])

    def _row(self, slot: int) -> Array:
        assert self.crops is None or not self.crops.held[slot], "only crops of it were kept"
        return self.rows.row(slot)
