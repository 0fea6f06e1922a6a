"""From addresses and a secret to a channel."""

import socket
import ssl
import time
from collections.abc import Sequence

from trainers.elastic.wire.address import Address
from trainers.elastic.wire.certificate import client_context
from trainers.elastic.wire.channel import SEND_SECONDS, Channel
from trainers.elastic.wire.greeting import greet
from trainers.elastic.wire.secret import Secret
from trainers.elastic.wire.stream import TlsStream
from trainers.elastic.wire.wire_errors import (
    AddressError,
    BadFrame,
    ChannelClosed,
    Unreachable,
    WireTimeout,
)


def connect(
    addresses: Sequence[Address],
    secret: Secret,
    timeout: float,
    *,
    send_seconds: float = SEND_SECONDS,
) -> Channel:
    """Return a channel to the first address that answers, in their order.

    The time that is left is shared by the addresses that are left. A wrong secret is an error at
    once, because it would be wrong at the next address too. (Looking up a name takes as long as the
    system lets it take.)
    """
    if not addresses:
        raise AddressError("there is no address to connect to")
    end = time.monotonic() + timeout
    failed: list[str] = []
    for number, address in enumerate(addresses):
        now = time.monotonic()
        deadline = now + max(0.0, end - now) / (len(addresses) - number)
        try:
            return _connected(address, secret, deadline, send_seconds)
        except (OSError, UnicodeError, WireTimeout, ChannelClosed, BadFrame) as error:
            failed.append(f"{address}: {_reason(error)}")
    raise Unreachable(
        f"nobody could be reached within {timeout:g} s; " + "; ".join(failed) + ". Start the anchor"
        " there, or correct the address"
    )


def _connected(address: Address, secret: Secret, deadline: float, send_seconds: float) -> Channel:
    stream = TlsStream(_dialled(address, deadline), client_context(), server=False)
    try:
        stream.shake_hands(deadline)
        greet(stream, secret, str(address), deadline)
    except BaseException:
        stream.close()
        raise
    return Channel(stream, send_seconds)


def _dialled(address: Address, deadline: float) -> socket.socket:
    """Return a connected socket, to the first of a name's IP addresses that takes it."""
    last: OSError | None = None
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, where) in enumerate(found):
        left = (deadline - time.monotonic()) / (len(found) - number)
        if left <= 0:
            break
        raw = socket.socket(family, kind, protocol)
        try:
            raw.settimeout(left)
            raw.connect(where)
            return raw
        except OSError as error:
            raw.close()
            last = error
        except BaseException:
            raw.close()
            raise
    raise last or TimeoutError("there was no time left to try it")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"something answers there that is no anchor or peer ({error.reason or error})"
    if isinstance(error, WireTimeout):
        return "it takes the connection and says nothing"
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
