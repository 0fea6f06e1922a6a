"""The secret that all peers of a training share, and how one proves to know it.

A proof is an HMAC over who proves, both nonces, and the digest of the certificate that this side
has seen. A man in the middle shows another certificate, so a proof that he passes on is wrong. The
secret itself never leaves this process.
"""

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from trainers.elastic.wire.wire_errors import SecretError

LEAST_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
CONTEXT = b"perfect-training elastic wire 1\0"
MAKE_ONE = "make one with `openssl rand -hex 32`, and give the same file to every peer"


@dataclass(frozen=True, slots=True)
class Secret:
    """What is never shown: neither `repr` nor an error tells it."""

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
    """Read the secret from a file. White space around it does not count. `loose`: also from a file
    that others may use, as where a container cannot set modes."""
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
