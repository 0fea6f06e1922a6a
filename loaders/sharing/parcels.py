"""A batch as a few bytes, and its pixels in memory that two processes share.

    batch -> pack -> Parcel: pickled nest, where each tensor and array lies     a few hundred bytes
                 '-> write:  | tensor, tensor | array | ...                |    the shared memory
    Parcel + memory -> unpack -> the batch, over that memory, without a copy

Tensors keep their dtypes, strides and classes, and those that share memory still do. The buffers of
numpy's arrays lie there, too. Everything else is pickled.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
import torch

from loaders.errors import SharingError
from loaders.slots.leaves import as_kind, attributes_of, kind_of

ALIGNMENT = 64
WIDEST = 16
"""The bytes of the largest number that a tensor has: a complex one."""


@dataclass(frozen=True, slots=True)
class AreaPart:
    """Bytes of the shared memory."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor over one of the parts of its parcel."""

    part: int
    dtype: torch.dtype
    first: int
    """The place of its first number in the part, counted in numbers of its dtype."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: type[torch.Tensor] | None
    """The subclass of torch.Tensor that it is, and its attributes. None: it is none."""
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A batch without its pixels."""

    nest: bytes
    tensors: tuple[PlacedTensor, ...]
    parts: tuple[AreaPart, ...]
    """Those of the tensors."""
    arrays: tuple[AreaPart, ...]
    """Those of the buffers that are no tensors'."""

    @property
    def nbytes(self) -> int:
        """How much shared memory it takes."""
        return max((part.start + part.nbytes for part in (*self.parts, *self.arrays)), default=0)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A parcel, and what is to be written into its memory."""

    parcel: Parcel
    memory: Sequence[torch.Tensor]
    """For each part of the parcel, its bytes."""
    buffers: Sequence[pickle.PickleBuffer]

    def write(self, area: mmap) -> None:
        """Write the pixels into the shared memory."""
        for part, source in zip(self.parcel.parts, self.memory, strict=True):
            # Torch would copy with a team of threads for each consumer, which wait for each other.
            np.copyto(_bytes_at(area, part).numpy(), source.numpy())
        for part, buffer in zip(self.parcel.arrays, self.buffers, strict=True):
            memoryview(area)[part.start : part.start + part.nbytes] = buffer.raw()


def pack(batch: Any) -> PackedBatch:
    """Return a batch in a form that can be sent. It must not change before it was written."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    packer = _Packer(file, protocol=5, buffer_callback=buffers.append)
    try:
        packer.dump(batch)
    except Exception as error:
        raise SharingError(
            f"a batch holds something that cannot be sent to another process: {error}; give its"
            " consumer a view() in the process of the stream, or leave that out of the samples"
        ) from error
    layout = _Layout(packer.tensors)
    memory, end = layout.memory(), 0
    parts: list[AreaPart] = []
    for nbytes in (*(m.nbytes for m in memory), *(b.raw().nbytes for b in buffers)):
        parts.append(AreaPart(end, nbytes))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    tensors = tuple(map(layout.place, packer.tensors))
    count = len(memory)
    parcel = Parcel(file.getvalue(), tensors, (*parts[:count],), (*parts[count:],))
    return PackedBatch(parcel, memory, buffers)


def unpack(parcel: Parcel, area: mmap | bytearray) -> Any:
    """Return the batch, over `area`, which it keeps as long as anybody holds a part of it."""
    with torch.inference_mode(False):
        memory = [_bytes_at(area, part).untyped_storage() for part in parcel.parts]
        tensors = [_tensor(placed, memory[placed.part]) for placed in parcel.tensors]
    whole = memoryview(area)
    arrays = [whole[part.start : part.start + part.nbytes] for part in parcel.arrays]
    unpacker = _Unpacker(io.BytesIO(parcel.nest), buffers=arrays)
    unpacker.tensors = tensors
    try:
        return unpacker.load()
    except Exception as error:
        raise SharingError(
            f"a batch holds something that cannot be rebuilt in this process: {error}; its classes"
            " must be in modules that can be imported here"
        ) from error


class _Packer(pickle.Pickler):
    """Numbers the tensors of a batch instead of pickling them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor) or not _lies_in_plain_memory(obj):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class _Unpacker(pickle.Unpickler):
    tensors: list[torch.Tensor]

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self.tensors[pid]


def _lies_in_plain_memory(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


class _Layout:
    """Which part of each storage the tensors of a batch use."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._used: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        """By the address of a storage: from where, and up to where."""
        for tensor in tensors:
            address, first, last = _reach(tensor)
            if address in self._used:
                _, *known = self._used[address]
                first, last = min(first, known[0]), max(last, known[1])
            self._used[address] = tensor.untyped_storage(), first, last
        self._parts = {address: number for number, address in enumerate(self._used)}

    def memory(self) -> list[torch.Tensor]:
        """Return the bytes that are used, storage by storage."""
        return [
            torch.empty(0, dtype=torch.uint8).set_(storage, first, (last - first,), (1,))
            for storage, first, last in self._used.values()
        ]

    def place(self, tensor: torch.Tensor) -> PlacedTensor:
        """Return where a tensor lies in what `memory` returns."""
        address = _reach(tensor)[0]
        before = self._used[address][1] // tensor.itemsize
        kind = kind_of(tensor)
        return PlacedTensor(
            self._parts[address],
            tensor.dtype,
            int(tensor.storage_offset()) - before if tensor.numel() else 0,
            tuple(tensor.shape),
            tensor.stride(),
            kind,
            {} if kind is None else {**attributes_of(tensor)},
        )


def _reach(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of a tensor's storage, and from which byte up to which it uses it."""
    if not tensor.numel():
        return 0, 0, 0
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((size - 1) * stride for size, stride in steps)
    # Tensors of other dtypes may begin in the part, so it begins where any of them could.
    begin = first * tensor.itemsize // WIDEST * WIDEST
    return tensor.untyped_storage().data_ptr(), begin, (last + 1) * tensor.itemsize


def _bytes_at(area: mmap | bytearray, part: AreaPart) -> torch.Tensor:
    if not part.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(area, dtype=torch.uint8, count=part.nbytes, offset=part.start)


def _tensor(placed: PlacedTensor, memory: torch.UntypedStorage) -> torch.Tensor:
    made = torch.empty(0, dtype=placed.dtype)
    made.set_(memory, placed.first, placed.shape, placed.strides)  # type: ignore[call-overload]
    return as_kind(made, placed.kind, placed.attributes)
