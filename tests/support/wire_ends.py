"""The two ends of a channel over localhost."""

import socket

from trainers.elastic.wire import Channel, Listener, Secret

SECRET = Secret(b"the secret of this test")
OTHER = Secret(b"the secret of somebody else")
LOOPBACK = "127.0.0.1"
Pair = tuple[Channel, Channel]


def plain(anchor: Listener) -> socket.socket:
    """Connect without TLS."""
    return socket.create_connection((anchor.address.host, anchor.address.port), 20)
