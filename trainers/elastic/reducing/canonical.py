"""The canonical reduce: sums that are a function of the ranks' tensors alone.

A flat tensor is cut into pieces, and a piece into a chunk for each rank. A rank receives its chunk
from every contributor (all-to-all), adds them in the order of ranks, and all ranks gather the sums.
Each number is added in the same order wherever it lies, so one process can repeat the sum from the
same tensors, bit for bit: `sum_in_order`. A member sends and receives 2 (n - 1) / n of the bytes,
as in a ring. While a piece is added, the next one travels.

Gloo writes only into buffers of this call, so a failed or abandoned operation does no harm: the
tensor that is reduced is only read, and `out` is written here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.distributed import Work

from trainers.elastic.errors import FrameError, GroupBroken, ReducingError
from trainers.elastic.reducing.group import Group, wait

PIECE_BYTES = 1 << 20
AHEAD, GATHERED = 4, 3
"""How many pieces travel before the first of them is added, and how many sums are gathered at once.
With one at a time, the link would idle whenever a member waits for another member's part."""

WIDER = MappingProxyType({torch.bfloat16: torch.float32, torch.float16: torch.float32})
"""Short floats are added in float32 and rounded once."""


def sum_in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the tensors, added from the first to the last."""
    if not tensors:
        raise ReducingError("a sum of no tensors was asked for: at least one must contribute")
    first = tensors[0]
    total = first.to(WIDER.get(first.dtype, first.dtype), copy=True)
    for tensor in tensors[1:]:
        total.add_(tensor.to(total.dtype))
    return total.to(first.dtype)


def reduce_in_order(
    group: Group,
    mine: torch.Tensor | None,
    out: torch.Tensor,
    alive: Callable[[], None],
    contributors: Sequence[int] | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Write the sum of the contributors' tensors into `out`, at every member of the group.

    `contributors` are the ranks whose tensors are added, None for all; every member passes the same
    ones. The others pass None as `mine` and add nothing, not even zeros. After an error `out` is
    undefined and `mine` is as it was.
    """
    ranks = list(range(group.size)) if contributors is None else sorted(contributors)
    _check(group, mine, out, ranks)
    sent = torch.empty(0, dtype=out.dtype) if mine is None else mine
    step = max(1, piece_bytes // out.element_size())
    bounds = [(a, min(a + step, out.numel())) for a in range(0, out.numel(), step)]
    travelling: list[_Travelling] = []
    gathering: list[tuple[_Travelling, torch.Tensor, Work]] = []
    begun = 0
    what = f"{group}: the reduce of {out.numel()} numbers"
    while gathering or travelling or begun < len(bounds):
        while begun < len(bounds) and len(travelling) < AHEAD:
            travelling.append(_send(group, sent, bounds[begun], ranks))
            begun += 1
        if travelling:
            piece = travelling.pop(0)
            wait(piece.work, alive, what)
            gathering.append((piece, *_gather(group, piece)))
        if len(gathering) > GATHERED or not (travelling or begun < len(bounds)):
            piece, sums, work = gathering.pop(0)
            wait(work, alive, what)
            out[piece.start : piece.end].copy_(sums[: piece.end - piece.start])


@dataclass(frozen=True, slots=True)
class _Travelling:
    """A part of the tensor on its way: who sends what to this rank, and where it lies."""

    start: int
    end: int
    chunk: int
    rows: list[torch.Tensor]
    work: Work


def _send(
    group: Group, mine: torch.Tensor, bounds: tuple[int, int], ranks: list[int]
) -> _Travelling:
    start, end = bounds
    chunk = -(-(end - start) // group.size)
    lengths = [max(0, min(chunk, end - start - r * chunk)) for r in range(group.size)]
    length_here = lengths[group.rank]
    item = mine.element_size()
    received = torch.empty(length_here * len(ranks), dtype=mine.dtype)
    sends = group.rank in ranks
    work = group.all_to_all(
        received.view(torch.uint8),
        (mine[start:end] if sends else mine).view(torch.uint8),
        [length_here * item if r in ranks else 0 for r in range(group.size)],
        [length * item if sends else 0 for length in lengths],
    )
    rows = list(received.view(len(ranks), length_here).unbind())
    return _Travelling(start, end, chunk, rows, work)


def _gather(group: Group, piece: _Travelling) -> tuple[torch.Tensor, Work]:
    total = sum_in_order(piece.rows)
    padded = torch.zeros(piece.chunk, dtype=total.dtype)
    padded[: total.numel()].copy_(total)
    sums = torch.empty(piece.chunk * group.size, dtype=total.dtype)
    work = group.all_gather(sums.view(torch.uint8), padded.view(torch.uint8), all_are_there=True)
    return sums, work


def _check(group: Group, mine: torch.Tensor | None, out: torch.Tensor, ranks: list[int]) -> None:
    if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= group.size:
        raise ReducingError(
            f"{group}: the contributors are {ranks}: name at least one rank, each once"
        )
    if (mine is not None) != (group.rank in ranks):
        raise ReducingError(
            f"{group}: the contributors are {ranks}, and a tensor was"
            f" {'not ' if mine is None else ''}given: exactly the contributors pass one"
        )
    for name, tensor in (("out", out), ("mine", mine)):
        if tensor is None:
            continue
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ReducingError(f"{group}: `{name}` must be flat, contiguous and on the host")
        if tensor.dtype != out.dtype or tensor.numel() != out.numel():
            raise ReducingError(
                f"{group}: `mine` has {tensor.numel()} numbers of {tensor.dtype}, `out` has"
                f" {out.numel()} of {out.dtype}: they must be alike"
            )


FRAME = 1024
"""Bytes of the first message: how long the whole is, and as much of it as there is room for."""

LENGTH = 8


def all_gather_bytes(
    group: Group, mine: bytes, size_limit: int, alive: Callable[[], None]
) -> list[bytes]:
    """Return the bytes of every rank, by rank.

    What fits into a frame travels in one message; if a member's bytes are longer, the rest travels
    in a second one. All members pass the same `size_limit`. A member with more bytes gets a
    `FrameError` before it sends anything, and the others get a `GroupBroken`.
    """
    if len(mine) > size_limit:
        raise FrameError(f"{group}: {len(mine)} bytes are to be sent, at most {size_limit} may be")
    room = FRAME - LENGTH
    frames = _gather_frames(group, len(mine).to_bytes(LENGTH, "little") + mine[:room], FRAME, alive)
    lengths = [int.from_bytes(frame[:LENGTH], "little") for frame in frames]
    for rank, length in enumerate(lengths):
        if length > size_limit:
            raise GroupBroken(
                f"{group}: rank {rank} announces {length} bytes, at most {size_limit} may be sent"
            )
    longest = max(lengths)
    rests = [b""] * group.size
    if longest > room:
        rests = _gather_frames(group, mine[room:], longest - room, alive)
    return [
        (frame[LENGTH:] + rest)[:length]
        for frame, rest, length in zip(frames, rests, lengths, strict=True)
    ]


def _gather_frames(group: Group, data: bytes, size: int, alive: Callable[[], None]) -> list[bytes]:
    sent = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    received = torch.empty(size * group.size, dtype=torch.uint8)
    wait(group.all_gather(received, sent), alive, f"{group}: an exchange of {size} bytes")
    whole = received.numpy().tobytes()
    return [whole[r * size : (r + 1) * size] for r in range(group.size)]
