"""Whether a peer is dead whose connection was closed, or only cannot be heard here any more."""

import socket
import time

PROBE_SECONDS = 0.5


def is_dead(host: str, port: int, seconds: float = PROBE_SECONDS) -> bool:
    """Whether the peer's host says that nobody listens where the peer gives its state away. A peer
    that lives listens there, also where a router has reset its connection to this anchor and it has
    found another one."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as probe:
                probe.settimeout(max(end - time.monotonic(), 0.001))
                if probe.recv(1):
                    return False
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            continue  # It is dying: it is asked once more.
        except OSError:  # Nobody answers, or who listens waits for a greeting.
            return False
    return False
