"""What peers tell an anchor that has just taken over, over real connections."""

import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from support.secret_files import write_secret

from benchmarks.swarms.anchor import make_anchor
from benchmarks.swarms.swarm import until
from trainers.elastic.anchor.anchor import Anchor
from trainers.elastic.deciding.view import Member, View
from trainers.elastic.peer.anchor_link import AnchorLink
from trainers.elastic.wire.connection import connect
from trainers.elastic.wire.secret import read_secret

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
