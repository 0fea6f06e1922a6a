"""Messages of all fields and payloads, in all pieces; and bytes that are no messages."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_frames import received

from trainers.elastic.wire.message import MAGIC, PREFIX, VERSION, encode
from trainers.elastic.wire.wire_errors import WireError

ANY_FIELDS = st.dictionaries(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    max_size=4,
)


@given(
    kind=st.text(min_size=1),
    fields=ANY_FIELDS,
    payloads=st.lists(st.binary(max_size=40)),
    pieces=st.lists(st.integers(1, 30)),
)
def test_what_is_sent_in_any_pieces_is_what_arrives(
    kind: str, fields: dict[str, Any], payloads: list[bytes], pieces: list[int]
) -> None:
    message = received(b"".join(encode(kind, fields, payloads)), pieces=pieces)
    assert (message.kind, dict(message.fields)) == (kind, fields)
    assert [bytes(payload.data) for payload in message.payloads] == payloads


@given(st.binary(min_size=PREFIX.size, max_size=200))
def test_no_garbage_gives_anything_but_a_wire_error(garbage: bytes) -> None:
    header = garbage[PREFIX.size :] or b"x"
    for data in (garbage, PREFIX.pack(MAGIC, VERSION, len(header)) + header):
        with pytest.raises(WireError):
            received(data)
