"""Where peers connect. A client that does not prove to know the secret never gets a channel.

    thread "listen"      takes connections, and begins a greeting for each
    threads "greet"      TLS and greeting, each within a few seconds; at most MOST_PENDING of them
    accept()             takes the channels that are ready

A client that connects and sends nothing delays no other one. When too many are being greeted, the
oldest of them is cut off: a greeting takes milliseconds, so the oldest is one that sends nothing.
"""

import ipaddress
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence

from loaders.closing import ClosedAtEnd
from trainers.elastic.wire.address import MOST_PORT, Address
from trainers.elastic.wire.channel import SEND_SECONDS, Channel
from trainers.elastic.wire.secret import Secret, greet, welcome
from trainers.elastic.wire.stream import TlsStream, client_context, make_certificate, server_context
from trainers.elastic.wire.wire_errors import (
    AddressError,
    BadFrame,
    ChannelClosed,
    InsecureNetwork,
    Unreachable,
    WireError,
    WireTimeout,
)

GREETING_SECONDS = 5.0
MOST_PENDING = 16
MOST_REFUSALS = 100
BACKLOG = 128
JOIN_SECONDS = 10.0
PAUSE_SECONDS = 0.1


class Greeter:
    """Makes channels of connections whose clients know the secret."""

    def __init__(self, secret: Secret, send_seconds: float) -> None:
        certificate = make_certificate()
        self._der = certificate.der
        self._context = server_context(certificate)
        self._secret = secret
        self._send_seconds = send_seconds

    def wrap(self, raw: socket.socket) -> TlsStream:
        """Take a connection over, before the handshake of TLS."""
        return TlsStream(raw, self._context, server=True)

    def greet(self, stream: TlsStream) -> Channel:
        """Return the channel. Raise a `WireError` that names the client if it is refused."""
        peer = str(Address(*stream.peer))
        deadline = time.monotonic() + GREETING_SECONDS
        try:
            stream.shake_hands(deadline)
            welcome(stream, self._secret, self._der, peer, deadline)
            return Channel(stream, self._send_seconds)
        except (WireTimeout, ChannelClosed, BadFrame) as error:
            raise type(error)(f"{peer} was not let in: {error}") from error
        except ssl.SSLError as error:
            reason = error.reason or str(error)
            raise BadFrame(
                f"{peer} was not let in: it does not speak TLS 1.3 ({reason})"
            ) from error
        except OSError as error:
            raise ChannelClosed(f"{peer} was not let in: {error}") from error


class Listener(ClosedAtEnd):
    """A port at which channels begin."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        *,
        insecure_network: bool = False,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        """Listen. Port 0 takes a free one. `send_seconds`: see `Channel`."""
        family, where = _resolve(host, port, insecure_network)
        self._greeter = Greeter(secret, send_seconds)
        self._changed = threading.Condition()
        self._ready: deque[Channel] = deque()
        self._refusals: deque[WireError] = deque(maxlen=MOST_REFUSALS)
        self._pending: dict[TlsStream, None] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._socket = _listen_at(family, where, Address(host, port))
        self.address = Address(host, self._socket.getsockname()[1])
        self._waking, self._wake = os.pipe()
        self._listening = threading.Thread(
            target=self._listen, name=f"perfect-elastic-listen-{self.address.port}", daemon=True
        )
        self._listening.start()

    def __repr__(self) -> str:
        return f"Listener({self.address}{', closed' if self._closed else ''})"

    def accept(self, timeout: float | None) -> Channel:
        """Return the next channel, or raise `WireTimeout` after `timeout` seconds (None: never)."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed, timeout)
            if self._closed:
                raise ChannelClosed(f"the listener at {self.address} is closed")
            if not self._ready:
                raise WireTimeout(f"nobody has connected to {self.address} in {timeout} s")
            return self._ready.popleft()

    def refusals(self) -> tuple[WireError, ...]:
        """Return why others were refused since the last call, the newest hundred reasons."""
        with self._changed:
            refusals = tuple(self._refusals)
            self._refusals.clear()
            return refusals

    def close(self) -> None:
        """Stop listening, and close what was not accepted. Accepted channels stay open."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            os.write(self._wake, b"x")
            for stream in self._pending:
                stream.hang_up()
            threads = (self._listening, *self._threads)
        for thread in threads:
            thread.join(JOIN_SECONDS)
        self._socket.close()
        os.close(self._waking)
        os.close(self._wake)
        while self._ready:
            self._ready.popleft().close()

    # ---- on the thread that listens -------------------------------------------------------------

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._waking, select.POLLIN)
        while not self._closed:
            poller.poll()
            try:
                raw, _ = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # No descriptors are left, or the client has gone.
                self._refuse(WireError(f"a connection to {self.address} was lost: {error}"))
                select.select([self._waking], [], [], PAUSE_SECONDS)
                continue
            try:
                stream = self._greeter.wrap(raw)
            except (OSError, ValueError) as error:
                raw.close()
                self._refuse(WireError(f"a client of {self.address} has gone at once: {error}"))
                continue
            self._begin(stream)

    def _begin(self, stream: TlsStream) -> None:
        thread = threading.Thread(
            target=self._greet, args=(stream,), name="perfect-elastic-greet", daemon=True
        )
        with self._changed:
            if len(self._pending) >= MOST_PENDING:
                next(iter(self._pending)).hang_up()
                # Its thread ends now, so there are never more than MOST_PENDING.
                self._changed.wait_for(lambda: len(self._pending) < MOST_PENDING)
            if self._closed:
                stream.close()
                return
            self._threads = [known for known in self._threads if known.is_alive()]
            try:
                thread.start()
            except RuntimeError as error:
                stream.close()
                self._refusals.append(WireError(f"no thread is left to greet a client: {error}"))
                return
            self._threads.append(thread)
            self._pending[stream] = None

    # ---- on the thread of a greeting ------------------------------------------------------------

    def _greet(self, stream: TlsStream) -> None:
        channel = refusal = None
        try:
            channel = self._greeter.greet(stream)
        except WireError as error:
            refusal = error
        finally:
            with self._changed:
                del self._pending[stream]
                if channel is None:
                    stream.close()
                elif self._closed:
                    channel.close()
                else:
                    self._ready.append(channel)
                if refusal is not None:
                    self._refusals.append(refusal)
                self._changed.notify_all()

    def _refuse(self, refusal: WireError) -> None:
        with self._changed:
            self._refusals.append(refusal)


def check_host(host: str, insecure_network: bool) -> None:
    """Raise `WireError` if an anchor or a peer must not listen at this host."""
    _resolve(host, 0, insecure_network)


def _resolve(host: str, port: int, insecure_network: bool) -> tuple[int, tuple[object, ...]]:
    """Return the family and the address to bind to. Raise `InsecureNetwork` if it means all
    interfaces, and `AddressError` if it is none."""
    if not 0 <= port <= MOST_PORT:
        raise AddressError(f"the port {port} to listen at is not between 0 and {MOST_PORT}")
    if not host.strip():
        host = "0.0.0.0"
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"{host}:{port} is no address to listen at: {error}") from error
    family, _, _, _, where = infos[0]
    everywhere = ipaddress.ip_address(str(where[0]).partition("%")[0]).is_unspecified
    if everywhere and not insecure_network:
        raise InsecureNetwork(
            f"{Address(host, port)} means all interfaces, and gloo's traffic between peers is"
            " neither authenticated nor encrypted: listen at the address of a private network or"
            " of a VPN"
        )
    return family, where


def _listen_at(family: int, where: tuple[object, ...], address: Address) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise AddressError(f"{address} cannot be listened at: {error}") from error
    return listening


def connect(
    addresses: Sequence[Address],
    secret: Secret,
    timeout: float,
    *,
    send_seconds: float = SEND_SECONDS,
) -> Channel:
    """Return a channel to the first address that answers, in their order.

    The addresses that are left share the time that is left. A wrong secret is an error at once,
    because it would be wrong at the next address, too. Looking up a name may take longer.
    """
    if not addresses:
        raise AddressError("there is no address to connect to")
    end = time.monotonic() + timeout
    failed: list[str] = []
    for number, address in enumerate(addresses):
        now = time.monotonic()
        deadline = now + max(0.0, end - now) / (len(addresses) - number)
        try:
            return _connect(address, secret, deadline, send_seconds)
        except (OSError, UnicodeError, WireTimeout, ChannelClosed, BadFrame) as error:
            failed.append(f"{address}: {_reason(error)}")
    raise Unreachable(
        f"nobody could be reached within {timeout:g} s; " + "; ".join(failed) + ". Start the anchor"
        " there, or correct the address"
    )


def _connect(address: Address, secret: Secret, deadline: float, send_seconds: float) -> Channel:
    stream = TlsStream(_dial(address, deadline), client_context(), server=False)
    try:
        stream.shake_hands(deadline)
        greet(stream, secret, str(address), deadline)
    except BaseException:
        stream.close()
        raise
    return Channel(stream, send_seconds)


def _dial(address: Address, deadline: float) -> socket.socket:
    """Return a connected socket, to the first of a name's IP addresses that takes it."""
    last: OSError | None = None
    infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, where) in enumerate(infos):
        left = (deadline - time.monotonic()) / (len(infos) - number)
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
