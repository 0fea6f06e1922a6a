"""Short messages that every member gets from every member: headers and votes."""

from collections.abc import Callable

import torch

from trainers.elastic.reducing.group import Group
from trainers.elastic.reducing.reducing_errors import FrameError, GroupBroken
from trainers.elastic.reducing.waiting import wait

FRAME = 1024
"""Bytes of the first message: how long the whole is, and as much of it as there is room for."""

LENGTH = 8


def all_gather_bytes(
    group: Group, mine: bytes, size_limit: int, alive: Callable[[], None]
) -> list[bytes]:
    """Return the bytes of every rank, by rank.

    What fits into a frame travels in one message; where a member's is longer, the rest travels in
    a second one. `size_limit` is the same at everybody; who has more to say gets a `FrameError`
    before anything is sent, and who hears of more a `GroupBroken`.
    """
    if len(mine) > size_limit:
        raise FrameError(f"{group}: {len(mine)} bytes are to be sent, at most {size_limit} may be")
    room = FRAME - LENGTH
    frames = _gathered(group, len(mine).to_bytes(LENGTH, "little") + mine[:room], FRAME, alive)
    lengths = [int.from_bytes(frame[:LENGTH], "little") for frame in frames]
    for rank, length in enumerate(lengths):
        if length > size_limit:
            raise GroupBroken(
                f"{group}: rank {rank} announces {length} bytes, at most {size_limit} may be sent"
            )
    longest = max(lengths)
    rests = [b""] * group.size
    if longest > room:
        rests = _gathered(group, mine[room:], longest - room, alive)
    return [
        (frame[LENGTH:] + rest)[:length]
        for frame, rest, length in zip(frames, rests, lengths, strict=True)
    ]


def _gathered(group: Group, data: bytes, size: int, alive: Callable[[], None]) -> list[bytes]:
    sent = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    received = torch.empty(size * group.size, dtype=torch.uint8)
    wait([group.all_gather(received, sent)], alive, f"{group}: an exchange of {size} bytes")
    whole = received.numpy().tobytes()
    return [whole[r * size : (r + 1) * size] for r in range(group.size)]
