"""A message as bytes: a prefix, a header in JSON, and raw payloads. Nothing here does I/O.

prefix   magic 4 | version 2 | length of the header 4       network byte order
header   {"kind": str, "fields": {...}, "payloads": [[size, dtype, shape], ...]}
payloads as they are in memory, one after the other
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainers.elastic.wire.wire_errors import BadFrame

MAGIC = b"PFEW"
VERSION = 1
PREFIX = struct.Struct("!4sHI")
MOST_HEADER_BYTES = 16 << 20
JOINED_BYTES = 16 << 10
"""Payloads up to this size travel with the header in one piece."""
MOST_SHOWN = 40

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class PayloadForm:
    """What a header says of a payload."""

    size: int
    """Bytes."""
    dtype: str = ""
    """The name of a tensor's type. Empty: the bytes are no tensor."""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Payload:
    """Raw bytes beside the fields of a message."""

    data: memoryview
    form: PayloadForm


@dataclass(frozen=True, slots=True)
class Message:
    """What one side has said to the other."""

    kind: str
    fields: Mapping[str, Any]  # values of JSON, and their kind says which
    payloads: tuple[Payload, ...] = ()


def encode(
    kind: str, fields: Mapping[str, Any], payloads: Sequence[Payload | Bytes] = ()
) -> list[memoryview]:
    """Return the pieces to be sent. Large payloads are not copied."""
    taken = [payload if isinstance(payload, Payload) else raw(payload) for payload in payloads]
    _check_fields(kind, fields)
    forms = [[p.form.size, p.form.dtype, p.form.shape] for p in taken]
    try:
        text = json.dumps({"kind": kind, "fields": dict(fields), "payloads": forms})
    except (TypeError, ValueError, RecursionError) as error:
        raise BadFrame(f"the fields of {kind!r} cannot be sent as JSON: {error}") from error
    header = text.encode()
    if len(header) > MOST_HEADER_BYTES:
        raise BadFrame(
            f"the fields of {kind!r} take {len(header)} bytes, and a header has at most"
            f" {MOST_HEADER_BYTES}: send them as payloads"
        )
    head = PREFIX.pack(MAGIC, VERSION, len(header)) + header
    pieces = [payload.data for payload in taken if payload.form.size]
    if sum(len(piece) for piece in pieces) <= JOINED_BYTES:
        return [memoryview(b"".join((head, *pieces)))]
    return [memoryview(head), *pieces]


def raw(data: Bytes) -> Payload:
    """Return bytes as a payload, without a copy."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise BadFrame("the bytes of a payload do not lie one after the other: copy them first")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    return Payload(view, PayloadForm(len(view)))


def _check_fields(kind: str, value: object, where: str = "") -> None:
    """JSON would turn a key that is no text into one, and nobody would be told."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise BadFrame(f"a field of {kind!r} has the key {where}{key!r}, which is no text")
            _check_fields(kind, inner, f"{where}{key}.")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_fields(kind, inner, where)


def header_bytes(prefix: bytes) -> int:
    """Return how long the header is, or refuse what is no prefix of a message."""
    magic, version, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise BadFrame(
            f"a message does not begin with {magic!r}: the other side speaks differently"
        )
    if version != VERSION:
        raise BadFrame(
            f"the other side sends messages of version {version}, this one reads {VERSION}: install"
            " the same version of perfect-training at both"
        )
    if not 0 < length <= MOST_HEADER_BYTES:
        raise BadFrame(f"a header has {length} bytes, and 1 to {MOST_HEADER_BYTES} are allowed")
    return length


def decode_header(header: bytes) -> tuple[str, Mapping[str, Any], tuple[PayloadForm, ...]]:
    """Return a message's kind, fields and payloads-to-come, or refuse what is no header."""
    try:
        known = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a header is no JSON ({error}): {_shown(header)}") from error
    if not isinstance(known, dict) or known.keys() != {"kind", "fields", "payloads"}:
        raise BadFrame(f"a header has not exactly kind, fields and payloads: {_shown(header)}")
    kind, fields, payloads = known["kind"], known["fields"], known["payloads"]
    if not isinstance(kind, str) or not kind:
        raise BadFrame(f"the kind of a message is no text: {_shown(header)}")
    if not isinstance(fields, dict) or not isinstance(payloads, list):
        raise BadFrame(f"fields or payloads of {kind!r} are of another type: {_shown(header)}")
    forms = tuple(_form(kind, payload) for payload in payloads)
    return kind, MappingProxyType(fields), forms


def _form(kind: str, payload: object) -> PayloadForm:
    match payload:
        case [int(size), str(dtype), list(shape)] if _sizes([size, *shape]):
            return PayloadForm(size, dtype, tuple(shape))
        case _:
            text = repr(payload)[:MOST_SHOWN]
            raise BadFrame(f"a payload of {kind!r} is no [size, dtype, shape]: {text}")


def _sizes(numbers: Sequence[object]) -> bool:
    return all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)


def _shown(header: bytes) -> str:
    return repr(bytes(header[:MOST_SHOWN]))
