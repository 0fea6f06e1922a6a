"""The columns of a slab: one for each leaf of a sample, with a place for each slot.

Arrays      memory for `slots` arrays like the template's; a slot may lie elsewhere (see `slab`)
Objects     whatever is no array
"""

import threading
from collections import UserList, deque
from collections.abc import Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from loaders.blocks import Blocks
from loaders.errors import BufferTooSmall, SampleShapeError
from loaders.pixels.kernels import Pictures, address
from loaders.slots.crop_rows import CropLayout, CropRows
from loaders.slots.leaves import (
    Leaf,
    as_kind,
    as_tensor,
    attributes_of,
    kind_of,
    like,
    mode_of,
    own,
    own_object,
)

NUMBERS = MappingProxyType({int: torch.int64, float: torch.float64, bool: torch.bool})

COLLATED = (int, float, UserList, deque, range)
"""What torch puts into tensors, though its class is no plain number, list or tuple (an IntEnum)."""

# numpy lacks these types, so their bits are held as integers.
CARRIERS = (
    (torch.bfloat16, torch.int16),
    (torch.float8_e4m3fn, torch.int8),
    (torch.float8_e4m3fnuz, torch.int8),
    (torch.float8_e5m2, torch.int8),
    (torch.float8_e5m2fnuz, torch.int8),
)

Array = NDArray[Any]


class Allowance:
    """The bytes that all columns of a slab together may take, rows and larger slots."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int, slot_bytes: int) -> None:
        """Take `nbytes` for a slot of `slot_bytes`. A negative number gives bytes back."""
        with self._lock:
            if self.limit is not None and self._taken + nbytes > self.limit:
                raise BufferTooSmall(
                    f"a sample of {slot_bytes} bytes does not fit: the buffer holds"
                    f" {self._taken} of at most {self.limit} bytes; raise buffer_bytes, lower"
                    " batch_size, or store smaller samples"
                )
            self._taken += nbytes


class Objects:
    """A column of leaves that are neither arrays nor numbers."""

    def __init__(self, slots: int) -> None:
        self._held: list[object] = [None] * slots

    def write(self, slot: int, leaf: object, sample_id: int) -> None:
        self._held[slot] = own(leaf)  # an array may lie in memory that the next read overwrites

    lend = write

    def at(self, slot: int) -> object:
        return self._held[slot]

    def copy(self, slot: int) -> object:
        return own_object(self._held[slot])

    def gather(self, slots: NDArray[np.int64], blocks: Blocks) -> Any:
        """A list of copies; a tensor of numbers of a user's own classes, as torch makes of them."""
        held = [own_object(self._held[slot]) for slot in slots.tolist()]
        return default_collate(held) if all(isinstance(x, COLLATED) for x in held) else held


class Arrays:
    """A column of array leaves of one type and one number of dimensions.

    Its memory has the template's dimensions from the outermost to the innermost in memory. `shape`
    and rows list them in that order too.
    """

    def __init__(
        self,
        template: Any,
        value: torch.Tensor,
        slots: int,
        number: int,
        allowance: Allowance,
        decoded: torch.Tensor | None = None,
        crops: CropLayout | None = None,
    ) -> None:
        """With `crops`, slots hold those, and pictures that they cannot be cut out of have memory
        of their own."""
        self.template = template
        self.kind = kind_of(template)
        """The subclass of torch.Tensor that the leaves are. None: it is none."""
        self._attributes: dict[int, dict[str, Any]] = {}
        """What the leaves of that subclass hold beside their values, slot by slot."""
        self._mode = mode_of(template)
        self._modes: dict[int, str] = {}
        """The modes of those pictures of Pillow that have another mode than the first one."""
        self.dtype = value.dtype
        # The data set's own columns may have gaps, or another order of dimensions than its samples
        # (torchvision's CIFAR10 has planes).
        lies = (value if decoded is None else decoded[0]).stride()
        self.order = sorted(range(value.ndim), key=lambda d: -lies[d])
        self.number = number
        self._allowance = allowance
        example = self._carried(value)
        self.shape = example.shape
        self.crops = None if crops is None else CropRows(crops, slots)
        row = example.shape if crops is None else (0,) * example.ndim
        self.memory = (
            np.empty((slots, *row), example.dtype) if decoded is None else self._carried(decoded, 1)
        )
        self._elsewhere = np.zeros(slots, dtype=bool)
        self._odd: dict[int, Array] = {}
        """The rows of those slots that lie elsewhere, or have another shape than the template."""
        self._own: dict[int, Array] = {}
        """The memory of those slots whose arrays do not fit into their rows."""
        if decoded is None:
            allowance.take(self.nbytes, self.nbytes // slots)
        # Where pictures lie, for the kernels. It is kept because asking numpy for it is slow.
        row_bytes = self.memory.nbytes // slots
        self._address = self.memory.ctypes.data + np.arange(slots, dtype=np.int64) * row_bytes
        self._size = np.tile(np.array(example.shape, np.int64), (slots, 1))

    @property
    def nbytes(self) -> int:
        cropped = self.crops.memory.nbytes if self.crops else 0
        own = sum(own.nbytes for own in list(self._own.values()))
        return self.memory.nbytes + cropped + own

    def write(self, slot: int, leaf: Any, sample_id: int) -> None:
        if kind_of(leaf) is not self.kind:
            raise SampleShapeError(
                f"part {self.number} of sample {sample_id} is a {type(leaf).__name__}, the first"
                f" one was a {type(self.template).__name__}: let the data set return parts of one"
                " kind"
            )
        if self.kind is not None:
            self._attributes[slot] = {**attributes_of(leaf)}
        if self._mode is not None:
            self._note_mode(slot, mode_of(leaf))
        self._fill(slot, leaf, sample_id)

    def takes_rows(self, slots: Sequence[int], rows: torch.Tensor | list[Any]) -> bool:
        """Whether these rows, one for each slot, fit as they are."""
        alike = self.kind is None and self._mode is None and self.crops is None
        if not alike or self._elsewhere[slots].any():
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
        self.memory[slots] = rows if isinstance(rows, list) else self._carried(rows, 1)

    def _note_mode(self, slot: int, mode: str | None) -> None:
        if mode is None or mode == self._mode:
            self._modes.pop(slot, None)
        else:
            self._modes[slot] = mode

    def _fill(self, slot: int, leaf: Any, sample_id: int) -> None:
        if not self.shape and type(leaf) in NUMBERS:
            if NUMBERS[type(leaf)] != self.dtype:
                raise self._of_another_type(NUMBERS[type(leaf)], sample_id)
            self.memory[slot] = leaf
            return
        array = self._arranged(leaf, sample_id)
        if self.crops and (whole := self.crops.keep(slot, array)):
            self._free_own(slot)
            self._odd.pop(slot, None)
            self._elsewhere[slot] = False
            self._size[slot] = *whole, array.shape[2]
            return
        at = address(array)
        if at != self._address[slot]:  # otherwise it was decoded there
            np.copyto(self.room(slot, array.shape), array)

    def _free_own(self, slot: int) -> None:
        if (own := self._own.pop(slot, None)) is not None:
            self._allowance.take(-own.nbytes, 0)

    def room(self, slot: int, shape: tuple[int, ...]) -> Array:
        """The memory of `slot` for an array of `shape`, with dimensions in the column's order."""
        if shape == self.memory.shape[1:]:
            row = self.memory[slot, ...]
            if self._elsewhere[slot]:
                self._place(slot, row, elsewhere=False)
            return row
        count = prod(shape)
        own = self._own.get(slot)
        if count <= self.memory[0].size:
            if self._allowance.limit is not None:
                self._free_own(slot)
            row = self.memory[slot].reshape(-1)[:count].reshape(shape)
        else:
            # Where memory is limited, a slot keeps no memory that it does not need now.
            too_much = self._allowance.limit is not None and own is not None and own.size > count
            if own is None or own.size < count or too_much:
                needed = count * self.memory.itemsize
                self._allowance.take(needed - (0 if own is None else own.nbytes), needed)
                own = self._own[slot] = np.empty(count, self.memory.dtype)
            row = own[:count].reshape(shape)
        self._place(slot, row, elsewhere=True)
        return row

    def lend(self, slot: int, leaf: Any, sample_id: int) -> None:
        self._modes.pop(slot, None)
        array = self._arranged(leaf, sample_id) if self.shape else None
        if array is None or not array.flags.c_contiguous:
            self._fill(slot, leaf, sample_id)
        else:
            self._place(slot, array, elsewhere=True)

    def at(self, slot: int) -> torch.Tensor:
        return self._uncarried(self._row(slot), 0)

    def copy(self, slot: int) -> Any:
        stored = self.at(slot).clone(memory_format=torch.preserve_format)
        made = like(self.template, stored, self._modes.get(slot, self._mode))
        return as_kind(made, self.kind, self.attributes_at(slot)) if self.kind else made

    def attributes_at(self, slot: int) -> dict[str, Any]:
        """What the leaf in `slot` holds beside its values. Empty: it is of no user's subclass."""
        return {**self._attributes.get(slot, {})}

    def one_size(self, slots: NDArray[np.int64]) -> bool:
        return bool((self._size[slots] == self._size[slots[:1]]).all())

    def gather(self, slots: NDArray[np.int64], blocks: Blocks) -> torch.Tensor:
        """A copy of these slots as a batch. The slots may be refilled at once."""
        sizes = self._size[slots]
        if not (sizes == sizes[0]).all():
            odd = slots[np.flatnonzero((sizes != sizes[0]).any(axis=1))[0]]
            one, other = (tuple(self.at(int(s)).shape) for s in (slots[0], odd))
            raise SampleShapeError(
                f"part {self.number} is {one} in one sample of a batch and {other} in another:"
                " begin augment with RandomResizedCrop, give a collate function, or resize pictures"
                " in the data set"
            )
        out = blocks.array((len(slots), *sizes[0].tolist()), self.memory.dtype)
        if not self._elsewhere[slots].any() and self.crops is None:
            # With any mode but "raise", numpy writes straight into `out`.
            np.take(self.memory, slots, axis=0, out=out, mode="clip")
        else:
            for n, slot in enumerate(slots.tolist()):
                np.copyto(out[n], self._row(slot))
        return self._uncarried(out, 1)

    def pictures(
        self, slots: NDArray[np.int64], serves: NDArray[np.int64] | None = None, view: int = 0
    ) -> tuple[Pictures, int, NDArray[np.int32] | None] | None:
        """Where the pictures lie, the number of planes of each, and the sizes of those pictures of
        which there are only the crops of these `serves` (zeros: a whole one lies there; None: all
        are whole). None: no kernel reads them."""
        if self.memory.dtype != np.uint8 or len(self.shape) != 3:
            return None
        if not self.memory.flags.c_contiguous or not self._size[slots].all():
            return None
        whole_sizes = None
        if self.order == [1, 2, 0]:
            sizes, planes = self._size[slots], 1
            channels = self.shape[2]
            height, width = sizes[:, 0], sizes[:, 1]
            if not (sizes[:, 2] == channels).all():
                return None
            addresses = self._address[slots]
            if self.crops and (cropped := self.crops.held[slots]).any():
                assert serves is not None
                at = self.crops.addresses(slots, serves, view)
                tall, wide = self.crops.layout.sizes[view]
                addresses = np.where(cropped, at, addresses)
                height, width = np.where(cropped, tall, height), np.where(cropped, wide, width)
                whole_sizes = np.where(cropped[:, None], sizes[:, :2], 0).astype(np.int32)
        elif self.order == [0, 1, 2]:
            # Each plane is a picture of one channel.
            sizes, planes, channels = self._size[slots], self.shape[0], 1
            if not (sizes[:, 0] == planes).all():
                return None
            height, width = np.repeat(sizes[:, 1], planes), np.repeat(sizes[:, 2], planes)
            offset = np.arange(planes) * (sizes[:, 1] * sizes[:, 2])[:, None]
            addresses = (self._address[slots][:, None] + offset).reshape(-1)
        else:
            return None
        odd = slots[self._elsewhere[slots]].tolist()
        keep = (self.memory, self.crops, [self._odd[slot] for slot in odd])
        at = Pictures(
            addresses.astype(np.uintp), height.astype(np.int32), width.astype(np.int32),
            channels, keep,
        )  # fmt: skip
        return at, planes, whole_sizes

    # ---- between a leaf and memory --------------------------------------------------------------

    def _arranged(self, leaf: Any, sample_id: int) -> Array:
        """A leaf as an array of this column's type and order of dimensions."""
        value: Leaf = as_tensor(leaf)
        if not isinstance(value, torch.Tensor) or value.ndim != len(self.order):
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(leaf).__name__
            first = tuple(self.shape[self.order.index(d)] for d in range(len(self.shape)))
            raise SampleShapeError(
                f"part {self.number} of sample {sample_id} is {got}, the first one was {first}: let"
                " the data set return parts of one kind"
            )
        if value.dtype != self.dtype:
            raise self._of_another_type(value.dtype, sample_id)
        return self._carried(value)

    def _of_another_type(self, dtype: torch.dtype, sample_id: int) -> SampleShapeError:
        return SampleShapeError(
            f"part {self.number} of sample {sample_id} is {dtype}, the first one was {self.dtype}:"
            " let the data set return parts of one type"
        )

    def _carried(self, value: torch.Tensor, lead: int = 0) -> Array:
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
        return self._odd[slot] if self._elsewhere[slot] else self.memory[slot, ...]

    def _place(self, slot: int, row: Array, elsewhere: bool) -> None:
        if elsewhere:
            self._odd[slot] = row
        else:
            self._odd.pop(slot, None)
        self._elsewhere[slot] = elsewhere
        self._address[slot] = address(row)
        self._size[slot] = row.shape
