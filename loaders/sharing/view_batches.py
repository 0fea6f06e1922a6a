"""What a view makes of the stream's batch: smaller ones, for its batch size, or a copy of its own.

    the stream's batch of 8     | s0 s1 s2 s3 s4 s5 s6 s7 |
    a view of 4                 | s0 s1 s2 s3 | s4 s5 s6 s7 |    same samples, same pixels

What one consumer changes in a copy, no other one sees. Large copies use memory again.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from loaders.arguments import Serving
from loaders.batching.device import tensors_of
from loaders.blocks import Blocks
from loaders.errors import SharingError
from loaders.order.reuse import Mode
from loaders.slots.leaves import as_kind, attributes_of, copy_object, kind_of
from loaders.stats import BatchInfo


def cut_batch(batch: Any, info: BatchInfo, pieces: int, size: int) -> list[tuple[Any, BatchInfo]]:
    """Cut a batch into at most `pieces` pieces of `size` samples. The last one may be smaller."""
    rows = len(info.ids)
    cut = []
    for first in range(0, rows, size):
        part = slice(first, first + size)
        number = info.batch_index * pieces + first // size
        ids = (info.positions[part], info.ids[part], info.serves[part], info.draws[part])
        cut.append((_rows(batch, part, rows), BatchInfo(info.pass_index, number, *ids)))
    return cut


def pieces_per_pass(share: int, serving: Serving, pieces: int, mode: Mode, drop_last: bool) -> int:
    """Return how many batches a pass has, each batch of the loader cut into `pieces` pieces."""
    size = serving.batch_size // pieces

    def count(items: int) -> int:
        full, rest = divmod(items, serving.batch_size)
        return full * pieces + (0 if drop_last else -(-rest // size))

    reuse = serving.reuse
    number = reuse * count(share) if mode == "immediate" else count(share * reuse)
    return number if serving.pass_limit is None else min(number, serving.pass_limit)


def batch_of_piece(
    piece: int, share: int, serving: Serving, pieces: int, mode: Mode
) -> tuple[int, int]:
    """Return in which batch of a pass this piece is, and how many of the batch's come before it."""
    rows, reuse = serving.batch_size, serving.reuse
    full = share // rows * reuse if mode == "immediate" else share * reuse // rows
    if piece < full * pieces:
        return divmod(piece, pieces)
    # Smaller batches end the pass: one, or `reuse` of them.
    rest = share % rows if mode == "immediate" else share * reuse % rows
    batch, before = divmod(piece - full * pieces, max(1, -(-rest * pieces // rows)))
    return full + batch, before


def _rows(batch: Any, part: slice, rows: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: _rows(value, part, rows) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows(value, part, rows) for value in batch))
    kinds = torch.Tensor | Mapping | list | tuple  # what a column of objects holds is neither
    if isinstance(batch, list | tuple) and all(isinstance(part, kinds) for part in batch):
        return type(batch)(_rows(value, part, rows) for value in batch)
    if not isinstance(batch, torch.Tensor | list | tuple) or len(batch) != rows:
        raise SharingError(
            f"a part of a batch of {rows} samples is a {type(batch).__name__} that has no row for"
            " each of them, so it cannot be cut: leave batch_size out of view()"
        )
    return batch[part]


HELD = 2
"""A consumer holds so many batches at a time, as a rule."""
LARGE = 1 << 16
"""From so many bytes on, memory is used again."""


class BatchCopies:
    """Makes the copies of one consumer."""

    def __init__(self, pin_memory: bool) -> None:
        self._blocks = Blocks(HELD, pin_memory)

    @property
    def nbytes(self) -> int:
        return self._blocks.made_bytes

    def copy(self, batch: Any) -> Any:
        """Return a copy of `batch` with the same values, strides and nest."""
        places = [t.untyped_storage().data_ptr() for t in tensors_of(batch) if t.nbytes]
        with torch.inference_mode(False):
            # Only a deep copy keeps two tensors together that share their memory.
            return self._copy_part(batch) if len({*places}) == len(places) else copy_object(batch)

    def _copy_part(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor) and not part.requires_grad:
            plain = self._copy_tensor(part.as_subclass(torch.Tensor))
            return as_kind(plain, kind_of(part), attributes_of(part))
        if type(part) is dict:
            return {key: self._copy_part(value) for key, value in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*(self._copy_part(value) for value in part))
        if type(part) in (list, tuple):
            return type(part)(self._copy_part(value) for value in part)
        return copy_object(part)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        order = sorted(range(tensor.ndim), key=lambda n: -tensor.stride(n))
        rows = tensor.permute(order)
        if tensor.nbytes < LARGE or not rows.is_contiguous() or tensor.device.type != "cpu":
            return tensor.clone()
        memory = self._blocks.array((tensor.nbytes,), np.dtype(np.uint8))
        made = torch.from_numpy(memory).view(tensor.dtype).view(rows.shape)
        made.copy_(rows)
        return made.permute([order.index(n) for n in range(tensor.ndim)])


def is_pinned(batch: Any) -> bool:
    """Return whether a batch lies in page-locked memory."""
    return torch.cuda.is_available() and any(t.is_pinned() for t in tensors_of(batch))
