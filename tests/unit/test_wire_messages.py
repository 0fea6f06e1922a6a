"""Messages, addresses, manifests, secrets: what is read, what is refused, what is never told."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.wire_frames import received

from trainers.elastic.anchor.kinds import difference
from trainers.elastic.peer.donated_state import payloads_of, tensors_of
from trainers.elastic.wire.address import parse_addresses
from trainers.elastic.wire.message import (
    MAGIC,
    MOST_HEADER_BYTES,
    PREFIX,
    VERSION,
    IncomingFrame,
    encode,
)
from trainers.elastic.wire.secret import Secret
from trainers.elastic.wire.stream import make_certificate
from trainers.elastic.wire.wire_errors import AddressError, BadFrame, SecretError, WireError


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


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("10.0.0.1:29400", [("10.0.0.1", 29400)]),
        (" node-1:1 , node-2:65535", [("node-1", 1), ("node-2", 65535)]),
        ("[::1]:80,[fe80::1%eth0]:81", [("::1", 80), ("fe80::1%eth0", 81)]),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, addresses: list[tuple[str, int]]) -> None:
    read = parse_addresses(text)
    assert [(a.host, a.port) for a in read] == addresses
    assert parse_addresses(",".join(map(str, read))) == read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no address is given"),
        ("a:1,", "has an empty address"),
        ("node", "'node' has no port: write HOST:PORT"),
        ("node:", "has no port"),
        ("[::1]", "has no port"),
        ("[::1]80", "has no port"),
        (":80", "has no host"),
        ("a b:80", "has no host"),
        ("node:http", "the port 'http' is no number"),
        ("node:-1", "the port '-1' is no number"),
        ("node:²", "is no number"),
        ("node:0", "the port 0 is not between 1 and 65535"),
        ("node:65536", "the port 65536 is not between"),
        ("node:99999999999", "is not between"),
        ("::1:80", "write .* for IPv6"),
        ("[::1:80", "no closing bracket"),
        ("[node]:80", "only an IPv6 address stands in brackets"),
        ("a:1,b:1,A:1", "names A:1 twice"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(AddressError, match=said):
        parse_addresses(text)


# ---- manifests ----------------------------------------------------------------------------------


def test_the_first_keys_that_differ_are_named_with_both_short_values() -> None:
    mine = {"same": "x", "config": "a" * 64, "torch": "2.15.0", "old": "1"}
    theirs = {"same": "x", "config": "b" * 64, "torch": "2.11.0", "new": "2"}
    assert difference(mine, theirs) == (
        "config is aaaaaaaaaaaa... here and bbbbbbbbbbbb... there; torch is 2.15.0 here and 2.11.0"
        " there; old is 1 here and missing there; 1 more differ: new"
    )


# ---- secrets and errors -------------------------------------------------------------------------


def test_a_short_secret_is_refused_and_none_is_shown() -> None:
    with pytest.raises(SecretError, match="has 15 bytes, and at least 16") as caught:
        Secret(b"fifteen letters")
    assert "fifteen" not in str(caught.value)
    assert "sixteen" not in repr(Secret(b"sixteen letters!"))


def test_a_proof_depends_on_everything_that_it_proves() -> None:
    secret, nonces = Secret(b"s" * 16), (b"c" * 32, b"s" * 32)
    proofs = {
        secret.proof(b"client", nonces, b"der"),
        secret.proof(b"server", nonces, b"der"),
        secret.proof(b"client", (nonces[1], nonces[0]), b"der"),
        secret.proof(b"client", (nonces[0], b"t" * 32), b"der"),
        secret.proof(b"client", nonces, b"another"),
        Secret(b"t" * 16).proof(b"client", nonces, b"der"),
    }
    assert len(proofs) == 6
    assert secret.proof(b"client", nonces, b"der") in proofs


def test_without_cryptography_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(WireError, match=r"pip install '\.\[elastic\]'"):
        make_certificate()


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
