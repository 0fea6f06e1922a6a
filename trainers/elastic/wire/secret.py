"""The secret that all peers of a training share, and how a side proves that it knows it.

A proof is an HMAC over the role of the side, both nonces, and the digest of the certificate that
this side has seen. A man in the middle shows another certificate, so a proof that he passes on is
wrong. The secret itself never leaves this process. After the handshake of TLS:

    client                            server
    magic, version, nonce   ------>
                            <------   magic, version, nonce    sent before it reads the client's
    proof                   ------>                            refused: one byte, and the end
                            <------   welcome, proof

The client proves first, so a stranger that connects learns nothing. Nonces are new each time, so a
recorded proof is worthless. Roles differ, so a proof cannot be sent back to the side that made it.
"""

import hashlib
import hmac
import os
import secrets
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

from trainers.elastic.wire.message import VERSION
from trainers.elastic.wire.stream import TlsStream
from trainers.elastic.wire.wire_errors import BadFrame, SecretError, WrongSecret

LEAST_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
CONTEXT = b"perfect-training elastic wire 1\0"
MAKE_ONE = "make one with `openssl rand -hex 32`, and give the same file to every peer"


@dataclass(frozen=True, slots=True)
class Secret:
    """The shared key. Neither `repr` nor an error shows it."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < LEAST_BYTES:
            raise SecretError(
                f"the secret has {len(self.key)} bytes, and at least {LEAST_BYTES} are needed:"
                f" {MAKE_ONE}"
            )

    def proof(self, role: bytes, nonces: tuple[bytes, bytes], certificate: bytes) -> bytes:
        """`nonces`: the client's and the server's; `certificate`: the DER that this side saw."""
        seen = hashlib.sha256(certificate).digest()
        return hmac.digest(self.key, b"".join((CONTEXT, role, *nonces, seen)), "sha256")


def read_secret(path: str | Path, *, loose: bool = False) -> Secret:
    """Read the secret from a file. White space around it does not count. `loose`: the file may be
    open to others, as where a container cannot set modes."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read().strip()
    except OSError as error:
        raise SecretError(
            f"the secret file {path} cannot be read ({error.strerror}): {MAKE_ONE}"
        ) from error
    if not key:
        raise SecretError(f"the secret file {path} is empty: {MAKE_ONE}")
    if mode & 0o077 and not loose:
        raise SecretError(
            f"others may use the secret file {path} (mode {mode:o}): run `chmod 600 {path}`, or"
            " allow it where modes cannot be set: --loose-key, in a configuration loose_key: true"
        )
    try:
        return Secret(key)
    except SecretError as error:
        raise SecretError(f"{path}: {error}") from None


MAGIC = b"PFEG"
NONCE_BYTES = 32
HELLO = struct.Struct(f"!4sH{NONCE_BYTES}s")
WELCOME, REFUSED = b"\1", b"\0"
CLIENT, SERVER = b"client", b"server"
SEND_SECONDS = 5.0
WHAT_TO_DO = (
    "use the same secret file at every peer and anchor; if it is the same, something between the"
    " two ends TLS, such as a proxy"
)


def greet(stream: TlsStream, secret: Secret, peer: str, deadline: float) -> None:
    """Greet a server. `peer`: its name in errors."""
    certificate = stream.certificate()
    mine = secrets.token_bytes(NONCE_BYTES)
    _send(stream, HELLO.pack(MAGIC, VERSION, mine))
    nonces = mine, _nonce(stream.read_exactly(HELLO.size, deadline), peer)
    _send(stream, secret.proof(CLIENT, nonces, certificate))
    if stream.read_exactly(1, deadline) != WELCOME:
        raise WrongSecret(f"{peer} does not take our secret: {WHAT_TO_DO}")
    proof = stream.read_exactly(PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, secret.proof(SERVER, nonces, certificate)):
        raise WrongSecret(f"{peer} does not know our secret: {WHAT_TO_DO}")


def welcome(
    stream: TlsStream, secret: Secret, certificate: bytes, peer: str, deadline: float
) -> None:
    """Greet a client. `certificate`: the DER of the one that this side shows."""
    hello, mine = stream.read_exactly(HELLO.size, deadline), secrets.token_bytes(NONCE_BYTES)
    _send(stream, HELLO.pack(MAGIC, VERSION, mine))
    nonces = _nonce(hello, peer), mine
    proof = stream.read_exactly(PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, secret.proof(CLIENT, nonces, certificate)):
        _send(stream, REFUSED)
        raise WrongSecret(f"{peer} does not know our secret: {WHAT_TO_DO}")
    _send(stream, WELCOME + secret.proof(SERVER, nonces, certificate))


def _send(stream: TlsStream, data: bytes) -> None:
    stream.write(memoryview(data), SEND_SECONDS)


def _nonce(hello: bytes, peer: str) -> bytes:
    magic, version, nonce = HELLO.unpack(hello)
    if magic != MAGIC:
        raise BadFrame(f"a greeting does not begin with {magic!r}: something else speaks there")
    if version != VERSION:
        raise BadFrame(
            f"this side speaks version {VERSION} of the protocol, {peer} version {version}: install"
            " the same version of perfect-training at both"
        )
    return nonce
