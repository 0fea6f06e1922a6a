"""What strangers and key holders may say: only their channel ends, and a line says so."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import pytest
import torch
from support.strange_messages import COMMIT, HELLO, MEMBER, TO_ANCHOR, Fields, malformed
from support.wire_ends import LOOPBACK, SECRET
from support.wire_frames import received

from trainers.elastic.anchor import kinds
from trainers.elastic.anchor.anchor import Anchor
from trainers.elastic.deciding.header import Header
from trainers.elastic.deciding.roster import Settings
from trainers.elastic.deciding.view import Member
from trainers.elastic.peer.anchor_link import AnchorLink
from trainers.elastic.peer.donated_state import DonatedState, payloads_of, tensors_of
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import Listener, connect
from trainers.elastic.wire.message import MAGIC, PREFIX, VERSION, Message, encode
from trainers.elastic.wire.wire_errors import BadFrame, ChannelClosed

WITH_PAYLOAD = ("put", "value")


def frame_of(header: object, payloads: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, VERSION, len(text)) + text + payloads


# ---- frames -------------------------------------------------------------------------------------

GOOD = {"kind": "k", "fields": {}, "payloads": []}
HEADERS: list[Any] = [
    b"\xff\xfe{}", b"{", b"[" * 100_000, b'{"kind":' * 50_000, b"9" * 10_000, [], None, 7, "x",
    {"kind": "k", "fields": {}}, GOOD | {"more": 1}, GOOD | {"kind": ""}, GOOD | {"kind": 3},
    GOOD | {"kind": "\ud800"}, GOOD | {"fields": []}, GOOD | {"fields": {"\ud800": 1}},
    GOOD | {"payloads": {}}, GOOD | {"payloads": [4]}, GOOD | {"payloads": [[4, "", [], 1]]},
    *(
        GOOD | {"payloads": [[size, "", []]]}
        for size in (-1, True, 1.5, "4", None, [4], 10**20, int("9" * 4300), float("nan"))
    ),
    *(
        GOOD | {"payloads": [[0, "float32", shape]]}
        for shape in ("x", [-2], [0, 1 << 62], [0, 10**20], [0, True], [0.0], [0] * 65, [[0]])
    ),
    GOOD | {"payloads": [[4, 1, []]]},
    GOOD | {"payloads": [[int("9" * 4300), "", []]] * 2},
]  # fmt: skip
NO_TENSORS = [
    [4, "", []], [4, "load", []], [4, "float32", [2]], [4, "float32", [1 << 61]],
    [0, "float32", [0, 1 << 61, 1 << 61]],
    [4, "Tensor", []], [4, "__name__", []], [4, "\ud7ff", []],
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_header_that_is_none_is_refused(header: object) -> None:
    with pytest.raises(BadFrame, match="a header is none"):
        received(frame_of(header), limit=10**5000)


@pytest.mark.parametrize("form", NO_TENSORS, ids=str)
def test_payloads_that_are_no_tensors_are_refused(form: list[Any]) -> None:
    message = received(frame_of(GOOD | {"payloads": [form]}, bytes(form[0])))
    with pytest.raises(BadFrame):
        tensors_of(message)


# ---- the anchor ---------------------------------------------------------------------------------


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def opened(told: list[str]) -> Iterator[Anchor]:
    """An anchor that must serve to the end of the test."""
    with Anchor(LOOPBACK, 0, SECRET, Settings(heartbeat=100), log_line=told.append) as anchor:
        thread = threading.Thread(target=anchor.run, daemon=True)
        thread.start()
        yield anchor
        channel = connect([anchor.address], SECRET, 20)
        with channel:
            channel.send("hello", **HELLO)
            assert channel.receive(20).kind == "welcome"
            assert thread.is_alive()
        anchor.stop()
        thread.join()


def refusal(channel: Channel) -> str:
    """Why the anchor refuses what was said, before it ends the channel."""
    why = ""
    with channel, pytest.raises(ChannelClosed):
        while True:
            message = channel.receive(20)
            why = message.fields["why"] if message.kind == "refuse" else why
    return why


def heard(kind: str, fields: Fields, payloads: int) -> Message:
    return received(b"".join(encode(kind, fields, [b"v"] * payloads)))


def test_a_message_with_a_part_that_is_wrong_is_malformed() -> None:
    for kind, fields in TO_ANCHOR.items():
        payloads = int(kind in WITH_PAYLOAD)
        heard(kind, fields, payloads).typed(kinds.TO_ANCHOR)
        for wrong in malformed(fields):
            with pytest.raises(BadFrame, match="a message is malformed"):
                heard(kind, wrong, payloads).typed(kinds.TO_ANCHOR)


@pytest.mark.parametrize("kind", TO_ANCHOR)
def test_a_malformed_message_ends_its_channel_alone(
    opened: Anchor, told: list[str], kind: str
) -> None:
    for number, fields in enumerate(islice(malformed(TO_ANCHOR[kind]), 0, None, 9)):
        channel = connect([opened.address], SECRET, 20)
        if kind != "hello":
            channel.send("hello", [], **HELLO | {"member": MEMBER | {"name": f"b{number}"}})
        channel.send(kind, [b"v"] * (kind in WITH_PAYLOAD), **fields)
        channel.send("beat", step=0)  # The refusal arrives though there is more to be read.
        address = str(channel.here)
        assert "malformed" in refusal(channel)
        assert any(address in line and "cut off" in line for line in told)


def test_a_member_of_a_generation_without_it_is_refused(opened: Anchor) -> None:
    view = {"generation": 9, "members": [MEMBER | {"name": "b"}]}
    with connect([opened.address], SECRET, 20) as channel:
        channel.send("hello", [], **HELLO | {"view": view})
        assert "not among the members" in channel.receive(20).fields["why"]
    assert opened.roster.present.number == 0


@pytest.mark.parametrize(
    "said",
    [
        [("beat", {"step": 1}, 0)],
        [("hello", HELLO, 0), ("hello", HELLO, 0)],
        [("hello", HELLO, 0), ("put", TO_ANCHOR["put"], 0)],
        [("hello", HELLO, 0), ("put", TO_ANCHOR["put"], 2)],
        [("hello", HELLO, 0), ("of a later version", {}, 0)],
        [("\ud7ff" * 1000, {}, 0)],
    ],
    ids=range(6),
)
def test_messages_out_of_place_end_their_channel(
    opened: Anchor, said: list[tuple[str, Fields, int]]
) -> None:
    channel = connect([opened.address], SECRET, 20)
    for kind, fields, payloads in said:
        channel.send(kind, [b"v"] * payloads, **fields)
    assert "the anchor cuts this peer off" in refusal(channel)


ODD = "m\n12:00:00 all peers have ended\x1b[2J\u202e"


def test_what_others_say_is_shown_as_one_line(opened: Anchor, told: list[str]) -> None:
    with ExitStack() as stack:
        for name, manifest in (("a", {"m": "1"}), ("b", {ODD: ODD}), ("c", {"m" * 9999: "1"})):
            channel = stack.enter_context(connect([opened.address], SECRET, 20))
            said = HELLO | {"manifest": manifest, "member": MEMBER | {"name": name}}
            channel.send("hello", [], **said)
            assert channel.receive(20).kind == ("welcome" if name == "a" else "refuse")
    assert any("all peers have ended" in line for line in told)
    assert all(line.isprintable() and len(line) < 5000 for line in told)


# ---- a peer -------------------------------------------------------------------------------------


def test_a_peer_finds_an_anchor_again_after_a_malformed_message(anchor: Listener) -> None:
    link = AnchorLink([anchor.address], SECRET, Member("a", LOOPBACK, 1), {})
    link.open(0)
    try:
        for kind, fields in (
            ("form", {}),
            ("news", {}),
            ("welcome", {"heartbeat": float("nan"), "min_peers": 1}),
        ):
            with anchor.accept(20) as server:
                assert server.receive(20).kind == "hello"
                server.send(kind, **fields)
        with anchor.accept(20) as server:
            server.send("found")
            assert link.orders.role(seconds=20).donor is None
    finally:
        link.close()


# ---- those who give a state, and those who take it ----------------------------------------------

TREES: list[Any] = [
    None, "x", 7, {}, {"a": 1, "b": 2}, {"dict": 1}, {"dict": [[1]]}, {"list": None},
    {"list": []}, {"tensor": 5}, {"tensor": "x"}, {"dict": [[{"list": []}, 1]]}, {"eval": "1"},
    {"dict": [["a", {"dtype": "load"}]]}, {"dict": [["a", {"float": "x"}]]},
    {"dict": [["a", {"size": "x"}]]}, {"dict": [["a", {"array": 0}]]},
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_state_that_is_none_is_refused(anchor: Listener, tree: object) -> None:
    newcomer = DonatedState(Member("donor", LOOPBACK, anchor.address.port), SECRET)
    with anchor.accept(20) as donor:
        donor.send("state", step=1, tree=tree, tensors=0)
        if tree == {"list": []}:
            assert newcomer.receive(lambda: False) == ({}, 1)
        else:
            with pytest.raises(BadFrame, match="sends a malformed state"):
                newcomer.receive(lambda: False)
    newcomer.close()


def test_a_commit_that_is_none_is_refused(anchor: Listener) -> None:
    newcomer = DonatedState(Member("donor", LOOPBACK, anchor.address.port), SECRET)
    with anchor.accept(20) as donor:
        for fields in (*malformed(COMMIT), COMMIT):
            total = payloads_of([torch.ones(3)]) if fields is not COMMIT else []
            donor.send("commit", total, **fields)
            with pytest.raises(BadFrame):
                newcomer.next(20)
        donor.send("commit", payloads_of([torch.ones(3)]), **COMMIT)
        commit = newcomer.next(20)
        assert commit is not None and commit.added == (("a", (0, 1)),)
    newcomer.close()


# ---- members ------------------------------------------------------------------------------------


def test_a_header_of_a_member_that_is_none_is_no_header() -> None:
    good: Fields = json.loads(Header("a", 1).encode())
    told = [json.dumps(fields).encode() for fields in malformed(good)]
    for data in (b"", b"\xff", b"[]", b"7", *told):
        with pytest.raises(ValueError):
            Header.decode(data)
