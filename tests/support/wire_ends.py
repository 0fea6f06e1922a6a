"""The two ends of a channel over localhost."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import Listener
from trainers.elastic.wire.secret import Secret

SECRET = Secret(b"the secret of this test")
OTHER = Secret(b"the secret of somebody else")
LOOPBACK = "127.0.0.1"
Pair = tuple[Channel, Channel]


def plain(anchor: Listener) -> socket.socket:
    """Connect without TLS."""
    return socket.create_connection((anchor.address.host, anchor.address.port), 20)


@contextmanager
def few_descriptors(left: int = 0) -> Iterator[None]:
    """Let this process have so many file descriptors left in this block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/dev/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)
