"""A certificate for one listener, signed by itself.

Nobody checks who signed it: the greeting proves that both sides saw the same one. `ssl` reads it
from a file only, so there is one for a moment, in a folder that is this user's alone.
"""

import os
import ssl
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trainers.elastic.wire.wire_errors import WireError

DAYS = 3650
"""Nobody checks the dates either: clocks of peers may differ."""


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """A certificate, in both of its forms, and its key."""

    der: bytes
    pem: bytes = field(repr=False)
    """The key and the certificate."""


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
    # No session is taken up again. A ticket that a client never reads would make its last message
    # get lost when it closes.
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
