"""Digests of tensors at the speed of memory: sums over rows and over columns, then BLAKE2.

words of 64 bits   | w w w w |  -> sum
                   | w w w w |  -> sum      Any word that differs, or two that are swapped,
                     |  |  |                change a row's sum or a column's.
                     v  v  v
                     sums
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.deciding.view import Added


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """One step's."""

    step: int
    added: Added
    total: Tensor
    """The sum of all gradients, flat, on the host."""
    logs: LaneLogs
    buffers: tuple[Tensor, ...]
    """The module's buffers after the step's first lane."""
    digest: str


COLUMNS = 1024
SIZE = 16
PARTS = 64
"""Weights are compared in so many parts, one a step."""


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return the digest of the tensors' bytes."""
    whole = hashlib.blake2b(digest_size=SIZE)
    for tensor in tensors:
        _add(whole, tensor)
    return whole.hexdigest()


def part_of_step(tensors: Sequence[Tensor], step: int) -> list[Tensor]:
    """Return the part of all tensors whose turn it is: each is compared once in `PARTS` steps."""
    k = step % PARTS
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return [t[t.numel() * k // PARTS : t.numel() * (k + 1) // PARTS] for t in flat]


def _add(whole: "hashlib.blake2b", tensor: Tensor) -> None:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = data.numel() // 8
    rows = words // COLUMNS
    table = data[: rows * COLUMNS * 8]
    if rows:
        if table.storage_offset() % 8:
            table = table.clone()
        numbers = table.view(torch.int64).view(rows, COLUMNS)
        for sums in (numbers.sum(0), numbers.sum(1)):
            whole.update(sums.cpu().numpy().tobytes())
    whole.update(data[rows * COLUMNS * 8 :].cpu().numpy().tobytes())
