"""Bytes over TLS, in both directions at once, with an end to every wait.

OpenSSL does not allow two threads in one connection. So the socket never blocks: each thread makes
one short call under a lock, and waits outside of it until the system reports that there is more.
"""

import math
import os
import select
import socket
import ssl
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trainers.elastic.wire.wire_errors import ChannelClosed, WireError, WireTimeout

DAYS = 3650
"""Peers do not check the dates, because their clocks may differ."""


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """A certificate, in both of its forms, and its key."""

    der: bytes
    pem: bytes = field(repr=False)


def make_certificate() -> OwnCertificate:
    """Make a key, and a certificate for it."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise WireError(
            "listening for peers needs the package cryptography"
            f" ({error}): pip install '.[elastic]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "perfect-training")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=DAYS))
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return OwnCertificate(
        certificate.public_bytes(serialization.Encoding.DER),
        pem + certificate.public_bytes(serialization.Encoding.PEM),
    )


def server_context(certificate: OwnCertificate) -> ssl.SSLContext:
    """Return what a listener wraps its connections with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No session is resumed. If a client never read its ticket, its last message would get lost when
    # it closes.
    context.num_tickets = 0
    with tempfile.TemporaryDirectory(prefix="perfect-elastic-") as folder:  # of mode 0700
        file = Path(folder) / "certificate.pem"
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(certificate.pem)
        context.load_cert_chain(file)
    return context


def client_context() -> ssl.SSLContext:
    """Return what a client wraps its connection with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


KEEPALIVE_SECONDS = 5
KEEPALIVE_TRIES = 3
"""An idle connection to a machine that is gone ends after about 20 s. Heartbeats are faster."""


class TlsStream:
    """A TLS connection, before and after its handshake."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        """Take the socket over. An OSError is raised if it is not connected any more."""
        raw.setblocking(False)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
            ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
            ("TCP_KEEPCNT", KEEPALIVE_TRIES),
        ):
            if hasattr(socket, option):  # Not every system has each of them.
                raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.here, self.peer = raw.getsockname()[:2], raw.getpeername()[:2]
        self._socket = context.wrap_socket(raw, server_side=server, do_handshake_on_connect=False)
        self._calling = threading.Lock()
        self.hung_up = False

    def shake_hands(self, deadline: float) -> None:
        """Do the handshake of TLS. `deadline`: on the monotonic clock."""
        while True:
            self._check_open()
            try:
                with self._calling:
                    self._socket.do_handshake()
                return
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wish:
                self._wait(wish, deadline)

    def certificate(self) -> bytes:
        """Return the DER of the server's certificate, whoever signed it."""
        certificate = self._socket.getpeercert(binary_form=True)
        if certificate is None:
            raise ChannelClosed("the other side has shown no certificate")
        return certificate

    def read(self, into: memoryview, deadline: float | None) -> int:
        """Read what is there, at least a byte. After `WireTimeout` nothing is lost."""
        while True:
            self._check_open()
            try:
                with self._calling:
                    count = self._socket.recv_into(into)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wish:
                self._wait(wish, deadline)
                continue
            except OSError as error:
                self._check_open()
                raise ChannelClosed(f"the connection is broken: {error}") from error
            if not count:
                self._check_open()
                raise ChannelClosed("the other side has closed the connection, or has died")
            return count

    def read_exactly(self, count: int, deadline: float) -> bytes:
        """Read `count` bytes by the deadline."""
        data = bytearray(count)
        left = memoryview(data)
        while left:
            left = left[self.read(left, deadline) :]
        return bytes(data)

    def write(self, data: memoryview, seconds: float) -> None:
        """Write everything. `seconds`: how long the other side may take nothing at all."""
        deadline: float | None = None
        while data:
            self._check_open()
            try:
                with self._calling:
                    count = self._socket.send(data)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wish:
                if deadline is None:
                    deadline = time.monotonic() + seconds
                self._wait(wish, deadline)
                continue
            except OSError as error:
                self._check_open()
                raise ChannelClosed(f"the connection is broken: {error}") from error
            data, deadline = data[count:], None

    def hang_up(self) -> None:
        """End the connection for both sides, and wake the threads that wait for it here."""
        self.hung_up = True
        with suppress(OSError):  # It may have ended already.
            # SSLSocket.shutdown would drop the encryption under a thread that reads.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back. No other thread may be in a call any more."""
        self.hung_up = True
        self._socket.close()

    def _check_open(self) -> None:
        if self.hung_up:
            raise ChannelClosed("this side has closed the connection")

    def _wait(self, wish: ssl.SSLError, deadline: float | None) -> None:
        milliseconds = None
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WireTimeout("the other side has not done its part in time")
            milliseconds = math.ceil(left * 1000)
        poller = select.poll()
        wants_to_read = isinstance(wish, ssl.SSLWantReadError)
        poller.register(self._socket, select.POLLIN if wants_to_read else select.POLLOUT)
        poller.poll(milliseconds)
