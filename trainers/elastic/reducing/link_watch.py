"""Lets the kernel end a group's connections whose other end is not reached any more.

A process that dies has its connections closed. A cable that is cut closes nothing: both ends would
wait for minutes, each with an anchor that hears them both. So each connection of a group is asked
whether it lives while it rests, and ends where what was sent is not acknowledged in time.
"""

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection

PROBES = 3
SO_ATTACH_FILTER = 26
DROPS_ALL = struct.pack("HBBI", 6, 0, 0, 0)
"""The filter of one instruction: return 0 bytes of a packet."""


def open_sockets() -> frozenset[int]:
    """The file descriptors of this process that are sockets; empty where no folder names them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError, ValueError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    found.add(int(name))
    return frozenset(found)


def end_when_unreachable(sockets: Collection[int], seconds: float) -> int:
    """Let connections end where the other side does not answer for so long. Return how many."""
    watched = 0
    for number in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as link:
            if link.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if link.type != socket.SOCK_STREAM:
                continue
            link.getpeername()  # raises OSError for one that listens
            each = max(1, round(seconds / (PROBES + 1)))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                ("TCP_KEEPIDLE", each),
                ("TCP_KEEPINTVL", each),
                ("TCP_KEEPCNT", PROBES),
                ("TCP_USER_TIMEOUT", round(seconds * 1000)),
            ):
                if hasattr(socket, option):  # not every system has each of them
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            watched += 1
    return watched


def take_nobody_more(sockets: Collection[int], addresses: bytes) -> int:
    """Let those of the sockets that listen at one of `addresses` get no packet any more. Return how
    many do. Gloo ends its process where no descriptor is left for a connection, so anybody who
    connects often enough could end it; and when a group is there, nobody else has to connect."""
    closed = 0
    code = ctypes.create_string_buffer(DROPS_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for number in sockets if sys.platform == "linux" else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as door:
            if not door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if struct.pack("=H", door.family) + door.getsockname()[1].to_bytes(2) in addresses:
                door.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
                closed += 1
    return closed
