"""What peers tell an anchor that has just taken over, over real connections."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.secret_files import write_secret

from benchmarks.swarms.anchor import make_anchor
from benchmarks.swarms.swarm import until
from trainers.elastic.anchor.anchor import Anchor
from trainers.elastic.deciding.view import Member, View
from trainers.elastic.peer.anchor_link import AnchorLink
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import connect
from trainers.elastic.wire.secret import read_secret
from trainers.elastic.wire.wire_errors import ChannelClosed

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
