"""Fuzzes what comes over the wire: bytes of frames, and messages of a key holder to an anchor.

    cd tests; python -m fuzz.fuzz_frames --seconds 60 --seed 0

Each input is served, or refused with a `BadFrame`. Everything else ends the fuzzer with exit code
1, the seed and the input. An anchor serves meanwhile, and must serve to the end.
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from support.fuzzing import TryOne, damaged, main, mutated
from support.strange_messages import HELLO, TO_ANCHOR, TO_PEER
from support.wire_ends import LOOPBACK, SECRET

from trainers.elastic.anchor import kinds
from trainers.elastic.anchor.anchor import Anchor
from trainers.elastic.deciding.roster import Settings
from trainers.elastic.peer.donated_state import tensors_of
from trainers.elastic.wire.listener import connect
from trainers.elastic.wire.message import IncomingFrame, Message, encode
from trainers.elastic.wire.wire_errors import BadFrame, ChannelClosed

PER_CONNECTION = 50
"""So many inputs are only read, for one that is said to an anchor."""


def read(data: bytes) -> Message | None:
    """Return the message; None where bytes are missing."""
    frame, left = IncomingFrame(), memoryview(data)
    while (wanted := frame.wanted()) is not None:
        count = min(len(wanted), len(left))
        if not count:
            return None
        wanted[:count], left = left[:count], left[count:]
        frame.took(count, 1 << 20)
    return frame.message()


def say(anchor: Anchor, said: list[tuple[str, dict[str, Any]]]) -> None:
    """Say this over a channel of its own. The anchor answers, or ends it."""
    with connect([anchor.address], SECRET, 60) as channel, suppress(ChannelClosed):
        for kind, fields in said:
            channel.send(kind, [b"v"] * (kind == "put"), **fields)
        channel.receive(60)


@contextmanager
def fuzzer() -> Iterator[TryOne]:
    """Give what tries one message, while an anchor serves."""
    known = {**kinds.TO_PEER, **kinds.TO_ANCHOR}
    samples = [*TO_ANCHOR.items(), *TO_PEER.items()]
    with Anchor(LOOPBACK, 0, SECRET, Settings(heartbeat=1e6), log_line=lambda _: None) as anchor:
        thread = threading.Thread(target=anchor.run, daemon=True)
        thread.start()

        def try_one(rng: random.Random) -> None:
            kind, good = rng.choice(samples)
            fields, given = mutated(good, rng), b""
            said = [(kind, fields if isinstance(fields, dict) else good)]
            if kind != "hello":
                said.insert(0, ("hello", HELLO))
            try:
                if rng.random() < 1 / PER_CONNECTION and kind != "ended":  # It may end the anchor.
                    say(anchor, said)
                    assert thread.is_alive(), "the anchor has ended"
                given = damaged(b"".join(encode(*said[-1], [b"v"])), rng)
                if (message := read(given)) is not None:
                    tensors_of(message)
                if (message := read(b"".join(encode(*said[-1], [b"v"])))) is not None:
                    message.typed(known)
            except BadFrame:
                return
            except Exception as error:
                error.add_note(f"{said!r}, then {given!r}")
                raise

        yield try_one
        anchor.stop()
        thread.join()


if __name__ == "__main__":
    sys.exit(main(__doc__, fuzzer))
