"""Messages between two sides that have proved to know the secret.

Any thread may send; one at a time receives, while others send. A receiver may give up and come back
in the middle of a message. A sender may not: a receiver that takes nothing for `send_seconds` loses
its channel, because half a message is on its way.

A message may get lost if this side closes the channel right after it, while messages of the other
side lie unread here: where arrival matters, the other side answers.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from loaders.closing import ClosedAtEnd
from trainers.elastic.wire.address import Address
from trainers.elastic.wire.message import Bytes, IncomingFrame, Message, Payload, encode
from trainers.elastic.wire.stream import TlsStream
from trainers.elastic.wire.wire_errors import ChannelClosed, WireTimeout

SEND_SECONDS = 10.0
MOST_PAYLOAD_BYTES = 16 << 20
"""What a receiver takes if it sets no limit."""
PART_BYTES = 1 << 20


class Channel(ClosedAtEnd):
    """One side of a connection."""

    def __init__(self, stream: TlsStream, send_seconds: float = SEND_SECONDS) -> None:
        """`stream`: greeted already. `send_seconds`: how long the receiver may take nothing."""
        self.here = Address(*stream.here)
        self.peer = Address(*stream.peer)
        self._stream = stream
        self._send_seconds = send_seconds
        # A thread that closes may be inside a call of its own: a signal, a callback.
        self._sending = threading.RLock()
        self._receiving = threading.RLock()
        self._frame = IncomingFrame()

    def __repr__(self) -> str:
        return f"Channel({self.here} -> {self.peer}{', closed' if self.closed else ''})"

    @property
    def closed(self) -> bool:
        """Whether this side has closed it. The other side's end shows in the next call."""
        return self._stream.hung_up

    def send(self, kind: str, /, payloads: Sequence[Payload | Bytes] = (), **fields: Any) -> None:
        """Send a message. When this returns, the message may still be on its way.

        Fields are values of JSON: tuples arrive as lists. A payload's bytes must not change before.
        """
        self._send(kind, encode(kind, fields, payloads))

    def send_in_parts(
        self,
        kind: str,
        payloads: Sequence[Payload | Bytes],
        fields: Mapping[str, Any],
        between: Callable[[], None],
    ) -> None:
        """Send a message, and call `between` before each part of it, where it may wait."""
        self._send(kind, _parts(encode(kind, fields, payloads), between))

    def _send(self, kind: str, pieces: Iterable[memoryview]) -> None:
        with self._sending:
            try:
                for piece in pieces:
                    self._stream.write(piece, self._send_seconds)
            except WireTimeout as error:
                self._stream.hang_up()
                raise WireTimeout(
                    f"{self.peer} has taken nothing for {self._send_seconds:g} s while {kind!r} was"
                    " being sent, and the channel is closed: it is frozen, or the network is cut"
                ) from error
            except ChannelClosed as error:
                raise ChannelClosed(f"{kind!r} was not sent to {self.peer}: {error}") from error
            except BaseException:
                self._stream.hang_up()  # Half a message may be on its way.
                raise

    def receive(self, timeout: float | None, *, limit: int = MOST_PAYLOAD_BYTES) -> Message:
        """Return the next message, or raise `WireTimeout` after `timeout` seconds (None: never).

        `limit`: a message whose header announces more bytes of payloads is refused before any
        memory is taken for them, and the channel is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._receiving.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            raise WireTimeout(f"another thread receives from {self.peer} already")
        try:
            while (wanted := self._frame.wanted()) is not None:
                count = self._stream.read(wanted, deadline)
                self._frame.took(count, limit)
            message, self._frame = self._frame.message(), IncomingFrame()
            return message
        except WireTimeout as error:
            where = "the rest of a message" if self._frame.begun else "a message"
            raise WireTimeout(f"{where} from {self.peer} has not come in {timeout} s") from error
        except ChannelClosed as error:
            cut = "in the middle of a message" if self._frame.begun else "no message has come"
            raise ChannelClosed(f"{self.peer}, {cut}: {error}") from error
        except BaseException as error:
            self._stream.hang_up()  # Nobody knows where the next message begins.
            self._frame = IncomingFrame()
            error.add_note(f"in a message from {self.peer}; the channel is closed")
            raise
        finally:
            self._receiving.release()

    def close(self) -> None:
        """End the channel for both sides. Threads that send or receive here raise at once."""
        self._stream.hang_up()
        with self._sending, self._receiving:
            self._stream.close()


def _parts(pieces: Iterable[memoryview], between: Callable[[], None]) -> Iterator[memoryview]:
    for piece in pieces:
        for begin in range(0, len(piece), PART_BYTES):
            between()
            yield piece[begin : begin + PART_BYTES]
