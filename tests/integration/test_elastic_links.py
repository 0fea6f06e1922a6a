"""What peers tell an anchor that has just taken over, and what they do where none answers."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.secret_files import write_secret
from support.wire_ends import LOOPBACK, SECRET
from support.wire_frames import received

from benchmarks.swarms.anchor import make_anchor
from benchmarks.swarms.swarm import until
from trainers.elastic.anchor.anchor import Anchor
from trainers.elastic.deciding.view import Member, View
from trainers.elastic.errors import ElasticError, Expelled
from trainers.elastic.peer import anchor_link
from trainers.elastic.peer.anchor_link import AnchorLink, AnchorOrders
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import Listener, connect
from trainers.elastic.wire.message import encode
from trainers.elastic.wire.secret import read_secret
from trainers.elastic.wire.wire_errors import ChannelClosed, Unreachable

HEARTBEAT = 4.0
ALIKE = {"model": "the same"}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return write_secret(tmp_path)


@pytest.fixture
def second_anchor(secret: Path) -> Iterator[Anchor]:
    """One that takes over from another one, which is gone."""
    settings = {"secret": secret, "heartbeat": HEARTBEAT, "follows": True, "only_anchor": False}
    with make_anchor(settings, lambda _: None) as anchor:
        thread = threading.Thread(target=anchor.run)
        thread.start()
        yield anchor
        anchor.stop()
        thread.join()


def test_a_newcomer_is_let_in_though_its_donor_came_back_after_it(
    second_anchor: Anchor, secret: Path
) -> None:
    addresses, key = [second_anchor.address], read_secret(secret)
    newcomer = AnchorLink(addresses, key, Member("new", "127.0.0.1", 1), ALIKE)
    donor = Member("donor", "127.0.0.1", 2)
    try:
        newcomer.open(0)
        newcomer.ready(donor.name)
        newcomer.step = (
            5  # A beat tells it, after the anchor has heard of a donor it does not know.
        )
        peers = second_anchor.roster.peers
        until(lambda: "new" in peers and peers["new"].at_step == 5, "the beat", HEARTBEAT)
        member = connect(addresses, key, HEARTBEAT)
        before = {"view": asdict(View(7, (donor,))), "step": 5, "has_step": 0}
        member.send("hello", member=asdict(donor), manifest=ALIKE, **before)
        while (told := member.receive(HEARTBEAT)).kind != "announce":
            pass
        assert told.fields["generation"] == 7
        member.close()
    finally:
        newcomer.close()


def test_a_peer_that_comes_to_the_gate_while_it_greets_an_anchor_is_at_the_gate(
    second_anchor: Anchor, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = AnchorLink(
        [second_anchor.address], read_secret(secret), Member("a", "127.0.0.1", 1), ALIKE
    )
    at_gate, leave = threading.Event(), threading.Event()

    def wait_at_gate() -> None:
        def idle() -> None:
            at_gate.set()
            if leave.is_set():
                raise ChannelClosed("the test ends")

        with contextlib.suppress(ChannelClosed):
            link.gate(5, idle, planned=False)

    trainer = threading.Thread(target=wait_at_gate)
    send = Channel.send

    def send_and_come(self: Channel, kind: str, *rest: Any, **fields: Any) -> None:
        send(self, kind, *rest, **fields)
        if kind == "hello":
            trainer.start()
            assert at_gate.wait(HEARTBEAT)

    monkeypatch.setattr(Channel, "send", send_and_come)
    try:
        link.open(0)
        peers = second_anchor.roster.peers
        until(lambda: "a" in peers and peers["a"].at_step == 5, "the gate", HEARTBEAT)
    finally:
        leave.set()
        trainer.join()
        link.close()


# ---- anchors that die, and links that fail ------------------------------------------------------


def give_up_after(seconds: float) -> Callable[[], None]:
    """Return what a peer at the gate calls, which raises where the gate waits longer."""
    end = time.monotonic() + seconds

    def check() -> None:
        assert time.monotonic() < end, "the peer would wait at the gate for ever"

    return check


@pytest.fixture
def link(anchor: Listener) -> Iterator[AnchorLink]:
    made = AnchorLink([anchor.address], SECRET, Member("a", LOOPBACK, 1), ALIKE)
    yield made
    made.close()


def test_patience_ends_though_an_anchor_died_while_it_heard_where_a_peer_is(
    anchor: Listener, link: AnchorLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, reports = Channel.send, list[Channel]()

    def dies(self: Channel, kind: str, *rest: Any, **fields: Any) -> None:
        if kind != "gate":
            return send(self, kind, *rest, **fields)
        reports.append(self)
        if len(reports) == 2:  # The first anchor was gone, and this was the last.
            anchor.close()
        raise ChannelClosed("the anchor has died")

    monkeypatch.setattr(Channel, "send", dies)
    monkeypatch.setattr(anchor_link, "PATIENCE_SECONDS", 0.5)
    link.open(0)
    with pytest.raises(Unreachable, match=r"no anchor could be reached for 0\.5 s"):
        link.gate(0, give_up_after(20), planned=True)
    assert len(reports) == 2 and all(channel.closed for channel in reports)


def test_a_channel_on_which_nobody_can_be_greeted_is_closed(
    link: AnchorLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Channel] = []

    def fails(self: Channel, *_: Any, **fields: Any) -> None:
        opened.append(self)
        raise ChannelClosed("the anchor has died")

    monkeypatch.setattr(Channel, "send", fails)
    with pytest.raises(ChannelClosed):
        link.open(0)
    assert [channel.closed for channel in opened] == [True]


def test_an_error_on_the_thread_of_a_link_is_raised_at_the_gate(
    anchor: Listener, link: AnchorLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(self: AnchorOrders, message: object) -> None:
        raise ValueError("nobody has foreseen this")

    monkeypatch.setattr(AnchorOrders, "take", take)
    link.open(0)
    with anchor.accept(20) as server:
        server.send("found")
        with pytest.raises(ElasticError, match=r"has failed: ValueError.*nobody has foreseen"):
            link.gate(0, give_up_after(20), planned=True)


def test_an_order_that_comes_in_the_last_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    orders, seconds = AnchorOrders("a"), 0.5

    def order_late(timeout: float) -> None:
        time.sleep(1.2 * seconds)
        orders.take(received(b"".join(encode("found", {}))))

    monkeypatch.setattr(orders.changed, "wait", order_late)
    assert orders.role(seconds=seconds).donor is None
    with pytest.raises(Expelled, match="named nobody else"):
        orders.role(after=9, seconds=seconds)
