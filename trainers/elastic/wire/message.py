"""A message as bytes: a prefix, a header in JSON, and raw payloads. Nothing here does I/O.

prefix   magic 4 | version 2 | length of the header 4       network byte order
header   {"kind": str, "fields": {...}, "payloads": [[size, dtype, shape], ...]}
payloads as they are in memory, one after the other
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown
from types import MappingProxyType
from typing import Any

from trainers.elastic.wire.wire_errors import BadFrame
from trainers.plain_values import NotOfType, typed, typed_fields

MAGIC = b"PFEW"
VERSION = 2
PREFIX = struct.Struct("!4sHI")
MOST_HEADER_BYTES = 16 << 20
JOINED_BYTES = 16 << 10
"""Payloads up to this size travel with the header in one piece."""
MOST_SIZE = 1 << 62
"""Bytes of a payload, and elements along a dimension. No machine has so much memory."""
MOST_SHOWN = 2000
MOST_DIMENSIONS = 64
"""As torch has."""

Bytes = bytes | bytearray | memoryview
Kinds = Mapping[str, Mapping[str, Any]]
"""The messages that one side accepts: their fields' types (plain_values.py), by kind."""
PAYLOAD = "payload"


@dataclass(frozen=True, slots=True)
class PayloadForm:
    """What a header says of a payload."""

    size: int
    dtype: str = ""
    """The name of a tensor's type. Empty: the bytes are no tensor."""
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) > MOST_DIMENSIONS or not all(
            0 <= size < MOST_SIZE for size in (self.size, *self.shape)
        ):
            raise ValueError(f"no machine has a payload of {self.size} bytes and such a shape")


@dataclass(frozen=True, slots=True)
class Payload:
    """Raw bytes beside the fields of a message."""

    data: memoryview
    form: PayloadForm


@dataclass(frozen=True, slots=True)
class Message:
    """A message as the receiver has it."""

    kind: str
    fields: Mapping[str, Any]  # values of JSON, and their kind says which
    payloads: tuple[Payload, ...] = ()

    def typed(self, kinds: "Kinds") -> dict[str, Any]:
        """Return the fields in their types, and the payload of a kind that has a field `payload`.

        Unknown and missing fields are refused. Sides of two versions never get here: they refuse
        each other in the greeting (secret.py)."""
        if self.kind not in kinds:
            raise BadFrame(f"no message of the kind {shown(self.kind)} is accepted here")
        given, expected = dict(self.fields), kinds[self.kind]
        if PAYLOAD in expected:
            if len(self.payloads) != 1:
                raise BadFrame(f"{self.kind!r} brings {len(self.payloads)} payloads, not one")
            given[PAYLOAD] = self.payloads[0].data
        try:
            return typed_fields(expected, given, self.kind)
        except NotOfType as error:
            raise BadFrame(f"a message is malformed: {error}") from error


def encode(
    kind: str, fields: Mapping[str, Any], payloads: Sequence[Payload | Bytes] = ()
) -> list[memoryview]:
    """Return the pieces to send. Large payloads are not copied."""
    wrapped = [payload if isinstance(payload, Payload) else raw(payload) for payload in payloads]
    _check_fields(kind, fields)
    forms = [[p.form.size, p.form.dtype, p.form.shape] for p in wrapped]
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
    pieces = [payload.data for payload in wrapped if payload.form.size]
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


def as_line(text: str) -> str:
    """Return a text of another side as one line. Characters that end a line or control a terminal
    are escaped."""
    shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def _check_fields(kind: str, value: object, where: str = "") -> None:
    """Refuse a key that is no text: JSON would silently turn it into one."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise BadFrame(f"a field of {kind!r} has the key {where}{key!r}, which is no text")
            _check_fields(kind, inner, f"{where}{key}.")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_fields(kind, inner, where)


def header_bytes(prefix: bytes) -> int:
    """Return how long the header is. Raise `BadFrame` if these bytes are no prefix."""
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
    """Return a message's kind, its fields and the forms of the payloads that follow. Raise
    `BadFrame` if these bytes are no header."""
    try:
        known = typed(FrameHeader, json.loads(header), "it")
        forms = tuple(PayloadForm(*payload) for payload in known.payloads)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a header is none ({error}): {shown(bytes(header))}") from error
    return known.kind, MappingProxyType(known.fields), forms


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A header's JSON."""

    kind: str
    fields: dict[Any, Any]
    payloads: tuple[tuple[int, str, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError("its kind is empty")


class IncomingFrame:
    """One message while it arrives."""

    def __init__(self) -> None:
        self._prefix = bytearray(PREFIX.size)
        self._parts: list[memoryview] = [memoryview(self._prefix)]
        """What is still to be filled, the first one perhaps in part."""
        self._header: bytearray | None = None
        self._forms: tuple[PayloadForm, ...] = ()
        self._placed: tuple[memoryview, ...] = ()
        self._kind = ""
        self._fields: Mapping[str, Any] = {}
        self.begun = False

    def wanted(self) -> memoryview | None:
        """Return where the next bytes go. None: the message is complete."""
        return self._parts[0] if self._parts else None

    def took(self, count: int, limit: int) -> None:
        """Note that `count` bytes were written to where they were wanted. `limit`: the most bytes
        of payloads."""
        self.begun = True
        self._parts[0] = self._parts[0][count:]
        if self._parts[0]:
            return
        del self._parts[0]
        if self._header is None:
            self._header = bytearray(header_bytes(bytes(self._prefix)))
            self._parts = [memoryview(self._header)]
        elif not self._kind:
            self._read_header(bytes(self._header), limit)

    def message(self) -> Message:
        """Return the complete message."""
        pairs = zip(self._placed, self._forms, strict=True)
        return Message(self._kind, self._fields, tuple(Payload(*pair) for pair in pairs))

    def _read_header(self, header: bytes, limit: int) -> None:
        kind, fields, forms = decode_header(header)
        total = sum(form.size for form in forms)
        if total > limit:
            raise BadFrame(
                f"{kind!r} brings {total} bytes of payloads, and at most {limit} are taken here"
            )
        self._kind, self._fields, self._forms = kind, fields, forms
        self._placed = tuple(memoryview(bytearray(form.size)) for form in forms)
        self._parts = [view for view in self._placed if len(view)]
