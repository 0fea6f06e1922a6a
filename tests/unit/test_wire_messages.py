"""A message as bytes, and back: any fields, any pieces, and everything that is no message."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from support.wire_frames import received

from trainers.elastic.peer.donated_state import payloads_of, tensors_of
from trainers.elastic.wire.message import (
    MAGIC,
    MOST_HEADER_BYTES,
    PREFIX,
    VERSION,
    IncomingFrame,
    encode,
)
from trainers.elastic.wire.wire_errors import BadFrame


def frame_of(header: object, payloads: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, VERSION, len(text)) + text + payloads


def joined(kind: str, fields: Mapping[str, Any], payloads: Sequence[Any] = ()) -> bytes:
    return b"".join(encode(kind, fields, payloads))


def test_a_large_payload_is_sent_without_a_copy_and_a_small_message_in_one_piece() -> None:
    large = bytearray(1 << 20)
    head, piece = encode("state", {}, [large])
    large[7] = 9
    assert piece[7] == 9
    assert len(head) < 200
    assert len(encode("state", {}, [b"small", b"too"])) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"a": {1: 2}}, "the key a.1, which is no text"),
        ({"a": [{"b": {None: 0}}]}, "the key a.b.None, which is no text"),
        ({"a": {3}}, "cannot be sent as JSON"),
        ({"a": torch.ones(1)}, "cannot be sent as JSON"),
        ({"a": "x" * MOST_HEADER_BYTES}, "send them as payloads"),
    ],
)
def test_fields_that_would_arrive_changed_or_not_at_all_are_refused(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadFrame, match=said):
        encode("step", fields)


def test_bytes_with_gaps_between_them_are_refused() -> None:
    with pytest.raises(BadFrame, match="copy them first"):
        encode("state", {}, [memoryview(b"abcdef")[::2]])


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (b"GET / HTTP/1.1", "the other side speaks differently"),
        (PREFIX.pack(MAGIC, VERSION + 1, 2) + b"{}", f"version {VERSION + 1}, this one reads"),
        (PREFIX.pack(MAGIC, VERSION, 0), "a header has 0 bytes"),
        (PREFIX.pack(MAGIC, VERSION, MOST_HEADER_BYTES + 1), f"1 to {MOST_HEADER_BYTES} are"),
        (PREFIX.pack(MAGIC, VERSION, (1 << 32) - 1), "4294967295 bytes"),
    ],
)
def test_a_prefix_that_is_none_is_refused(prefix: bytes, said: str) -> None:
    frame = IncomingFrame()
    wanted = frame.wanted()
    assert wanted is not None
    wanted[:] = prefix[: PREFIX.size]
    with pytest.raises(BadFrame, match=said):
        frame.took(PREFIX.size, 0)


GOOD = {"kind": "k", "fields": {}, "payloads": []}


def test_payloads_above_the_limit_are_refused_before_memory_is_taken_for_them() -> None:
    size = 1 << 60  # Nobody has that much.
    header = GOOD | {"payloads": [[5, "", []], [size, "", []]]}
    with pytest.raises(BadFrame, match=f"brings {size + 5} bytes of payloads, and at most 100"):
        received(frame_of(header), limit=100)
    assert received(joined("k", {}, [bytes(100)]), limit=100).payloads[0].form.size == 100


# ---- tensors ------------------------------------------------------------------------------------

TENSORS = (
    torch.arange(12, dtype=torch.float32).reshape(3, 4),
    torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T,
    torch.tensor(True),
    torch.empty(0, 7, dtype=torch.int64),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor([float("nan"), -0.0], dtype=torch.float16),
)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(payloads_of([tensor])[0].data)


def test_tensors_arrive_with_type_shape_and_every_bit() -> None:
    data = joined("state", {}, payloads_of(TENSORS))
    arrived = tensors_of(received(data, pieces=[3, 30, 2]))
    assert [(t.dtype, t.shape) for t in arrived] == [(t.dtype, t.shape) for t in TENSORS]
    assert [bits(t) for t in arrived] == [bits(t) for t in TENSORS]
    assert torch.equal(arrived[4], TENSORS[4])


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ([4, "", []], "payload 0 of 'k' is no tensor: its type is ''"),
        ([4, "load", []], "is no tensor: its type is 'load'"),
        ([4, "float32", [2]], r"has 4 bytes, which is not float32 \[2\]"),
    ],
)
def test_payloads_that_are_no_tensors_are_refused(form: list[object], said: str) -> None:
    message = received(frame_of(GOOD | {"payloads": [form]}, bytes(4)))
    with pytest.raises(BadFrame, match=said):
        tensors_of(message)


def test_only_dense_tensors_of_the_host_are_sent() -> None:
    with pytest.raises(BadFrame, match="tensor 1 is on meta"):
        payloads_of([torch.ones(1), torch.ones(1, device="meta")])
    with pytest.raises(BadFrame, match="only dense tensors"):
        payloads_of([torch.ones(2, 2).to_sparse()])
