"""A member gives its state to newcomers over real connections, and waits for none for long."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.secret_files import write_secret

from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.deciding.view import Member
from trainers.elastic.errors import SwarmRefused
from trainers.elastic.peer.donated_state import DonatedState
from trainers.elastic.peer.donor import HELD_SECONDS, SETUP_SECONDS, Donor
from trainers.elastic.wire.secret import Secret, read_secret
from trainers.elastic.work.digests import Commit

NUMBERS = 4 << 20
"""Of a total: more bytes than the system keeps for who does not take them."""


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return read_secret(write_secret(tmp_path))


@pytest.fixture
def donor(secret: Secret) -> Iterator[Donor]:
    donor = Donor("127.0.0.1", secret)
    yield donor
    donor.close()


def commit(step: int) -> Commit:
    total = torch.full((NUMBERS,), float(step))
    return Commit(step, (("a", (0, 1, 2, 3)),), total, LaneLogs(4, 0), (), str(step))


def given(donor: Donor, newcomer: DonatedState) -> None:
    """Let the newcomer have the state after step 5."""
    received: list[object] = []
    thread = threading.Thread(target=lambda: received.append(newcomer.receive(lambda: False)))
    thread.start()
    while not donor.followed:
        donor.give(lambda: {"weights": torch.zeros(3)}, 5)
    thread.join()
    [(state, step)] = received  # pyright: ignore[reportGeneralTypeIssues]
    assert step == 5 and torch.equal(state["weights"], torch.zeros(3))


def test_a_newcomer_follows_every_commit(donor: Donor, secret: Secret) -> None:
    newcomer = DonatedState(Member("donor", "127.0.0.1", donor.port), secret)
    given(donor, newcomer)
    feeding = threading.Thread(target=lambda: [donor.record(commit(n)) for n in range(5, 15)])
    feeding.start()
    for step in range(5, 15):
        found = newcomer.next(30.0)
        assert found is not None and found.step == step
        assert torch.equal(found.total, commit(step).total)
    feeding.join()
    newcomer.close()


def test_a_newcomer_that_takes_nothing_more_is_refused_with_the_numbers(
    donor: Donor, secret: Secret
) -> None:
    newcomer = DonatedState(Member("donor", "127.0.0.1", donor.port), secret)
    given(donor, newcomer)
    donor.record(commit(5))
    assert newcomer.next(30.0) is not None
    step = 6
    while donor.followed:  # Nobody takes what is recorded here.
        donor.record(commit(step), lane_rate=8.0)
        step += 1
    with pytest.raises(
        SwarmRefused, match=r"too slow for the swarm, which has waited (\S+) s"
    ) as it:
        for _ in range(step):
            newcomer.next(30.0)
    waited = float(str(it.value).split("has waited ")[1].split()[0])
    assert HELD_SECONDS <= waited < SETUP_SECONDS
    assert "of 4 lanes. It needs " in str(it.value)
    newcomer.close()


def test_a_newcomer_gets_all_where_the_network_is_never_free(donor: Donor, secret: Secret) -> None:
    newcomer = DonatedState(Member("donor", "127.0.0.1", donor.port), secret)
    with donor.standing_back():
        given(donor, newcomer)
        for step in range(5, 8):
            donor.record(commit(step))
            found = newcomer.next(30.0)
            assert found is not None and torch.equal(found.total, commit(step).total)
    newcomer.close()
