"""What both sides say after the handshake of TLS, so that each knows that the other has the secret.

    client                            server
    magic, version, nonce   ------>
                            <------   magic, version, nonce    said before it looks at the client's
    proof                   ------>                            refused: one byte, and the end
                            <------   welcome, proof

The client proves first, so who only asks learns nothing. Nonces are new each time, so a proof that
somebody kept is worth nothing. Roles differ, so a proof cannot be sent back to who made it.
"""

import hmac
import secrets
import struct

from trainers.elastic.wire.message import VERSION
from trainers.elastic.wire.secret import PROOF_BYTES, Secret
from trainers.elastic.wire.stream import TlsStream
from trainers.elastic.wire.wire_errors import BadFrame, WrongSecret

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
    """Greet a server. `peer`: how an error calls it."""
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
