"""A message that is on its way in, from bytes that come in any pieces.

    wanted()  -> where the next bytes go         prefix -> header -> payload 0 -> payload 1 ...
    took(n)   <- so many of them are there       checks a length before it allocates any of it

A receiver that gives up for now goes on later, in the middle of the message. Nothing here does I/O.
"""

from collections.abc import Mapping
from typing import Any

from trainers.elastic.wire.message import (
    PREFIX,
    Message,
    Payload,
    PayloadForm,
    decode_header,
    header_bytes,
)
from trainers.elastic.wire.wire_errors import BadFrame


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
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether a part of the message is here."""
        return self._begun

    def wanted(self) -> memoryview | None:
        """Return where the next bytes go. None: the message is complete."""
        return self._parts[0] if self._parts else None

    def took(self, count: int, limit: int) -> None:
        """`count` bytes have been written to what was wanted. `limit`: most bytes of payloads."""
        self._begun = True
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
