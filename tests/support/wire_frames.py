"""What comes of the bytes of a message, in whatever pieces they arrive."""

from collections.abc import Sequence

from trainers.elastic.wire.message import IncomingFrame, Message


def received(data: bytes, *, limit: int = 1 << 20, pieces: Sequence[int] = ()) -> Message:
    frame = IncomingFrame()
    sizes = iter(pieces)
    while (wanted := frame.wanted()) is not None:
        piece = data[: min(len(wanted), next(sizes, len(wanted)))]
        assert piece, "the message is longer than its bytes"
        wanted[: len(piece)] = piece
        data = data[len(piece) :]
        frame.took(len(piece), limit)
    assert not data
    return frame.message()
