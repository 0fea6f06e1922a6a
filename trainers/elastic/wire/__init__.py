"""Messages between peers and the anchor: encrypted, authenticated and framed.

A `Listener` lets in who knows the secret, `connect` is the other side, and a `Channel` is what both
get. A message is a kind, fields that JSON can hold, and raw bytes. Nothing is ever unpickled. Only
`tensors.py` needs torch, which an anchor has not.

    connect(addresses, secret)                 Listener(host, port, secret)
      TCP, TLS 1.3            <------------>     a certificate of this listener alone
      greeting: two nonces, two proofs <--->     each proof holds the certificate's digest
      Channel  --- kind, fields, payloads --->   Channel

May import: elastic, plain_values.
"""

from trainers.elastic.wire.address import Address, parse_addresses
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.connection import connect
from trainers.elastic.wire.listener import Listener, check_host
from trainers.elastic.wire.manifest import Manifest, difference
from trainers.elastic.wire.message import Message, Payload, PayloadForm, as_line
from trainers.elastic.wire.secret import Secret, read_secret
from trainers.elastic.wire.wire_errors import (
    AddressError,
    BadFrame,
    ChannelClosed,
    InsecureNetwork,
    SecretError,
    Unreachable,
    WireError,
    WireTimeout,
    WrongSecret,
)

__all__ = [
    "Address",
    "AddressError",
    "BadFrame",
    "Channel",
    "ChannelClosed",
    "InsecureNetwork",
    "Listener",
    "Manifest",
    "Message",
    "Payload",
    "PayloadForm",
    "Secret",
    "SecretError",
    "Unreachable",
    "WireError",
    "WireTimeout",
    "WrongSecret",
    "as_line",
    "check_host",
    "connect",
    "difference",
    "parse_addresses",
    "read_secret",
]
