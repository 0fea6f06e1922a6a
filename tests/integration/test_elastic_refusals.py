"""What a swarm does not take is refused with the reason, and those who are there train on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.elastic_swarms import HEARTBEAT
from support.secret_files import write_secret

from benchmarks.swarms.swarm import Nursery, Process, Swarm, free_ports, until

OF_THE_RUN: dict[str, tuple[dict[str, Any], str]] = {
    "manual optimization": (
        {"odd": "manual", "clip": None}, "manual optimization steps when it wants",
    ),
    "sync_dist": ({"odd": "sync_dist"}, "self.log('train_loss', sync_dist=...)"),
    "devices": ({"trainer": {"devices": 2}}, "devices=2"),
    "validation after every batch": (
        {"val": True, "trainer": {"val_check_interval": 1}}, "newcomers would never be let in",
    ),
    "lanes that do not divide": (
        {"lanes": 7}, "a global batch of 32 cannot be divided into 7 equal lanes",
    ),
    "a sum of another name": ({"sum": "slow"}, "sum='slow': choose one of fast, exact"),
}  # fmt: skip
OF_THE_SWARM: dict[str, tuple[dict[str, Any], str]] = {
    "other lanes": ({"lanes": 4}, "strategy.lanes"),
    "another sum": ({"sum": "exact"}, "strategy.sum"),
    "another batch": ({"batch": 64}, "batch of a lane"),
    "another model": ({"width": 17}, "model"),
    "other data": ({"data": 2}, "data"),
    "fewer samples": ({"samples": 199}, "samples"),
    "another seed of the loader": ({"loader_seed": 4}, "seed"),
}  # fmt: skip


def error_of(peer: Process) -> str:
    return peer.result()["error"]


@dataclass(frozen=True)
class Busy:
    """A swarm in which a peer trains all the time."""

    swarm: Swarm
    anchor: Process

    @property
    def join(self) -> str:
        return self.swarm.join

    def error_of(self, name: str, **settings: Any) -> str:
        return error_of(self.swarm.peer(name, steps=3, **settings))


@pytest.fixture(scope="module")
def busy(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    folder = tmp_path_factory.mktemp("swarm")
    with Swarm(folder, nursery, own_anchor=False) as swarm:
        anchor = swarm.anchor("anchor", heartbeat=HEARTBEAT)
        swarm.join = anchor.out.joinpath("address.txt").read_text()
        trains = swarm.peer("trains", steps=10**6, slow=0.01, serves=False)
        trains.until_step(2)
        yield Busy(swarm, anchor)
        trains.until_step(trains.step + 1)


@pytest.mark.parametrize("what", OF_THE_RUN)
def test_a_run_that_cannot_be_trained_exactly_is_refused_before_its_first_step(
    nursery: Nursery, tmp_path: Path, what: str
) -> None:
    settings, why = OF_THE_RUN[what]
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        peer = swarm.peer("odd", steps=3, **settings)
        error = error_of(peer)
        assert why in error
        assert error.startswith("CannotBeElastic: ")
        assert peer.step == 0


@pytest.mark.parametrize("what", OF_THE_SWARM)
def test_a_peer_that_trains_something_else_is_refused_with_the_key(busy: Busy, what: str) -> None:
    settings, key = OF_THE_SWARM[what]
    error = busy.error_of(what.replace(" ", "_"), **settings)
    assert error.startswith("SwarmRefused: this peer does not train the same: ")
    assert key in error


def test_a_newcomer_is_refused_where_a_state_cannot_be_sent_and_nobody_else_ends(
    nursery: Nursery, tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery) as swarm:
        trains = swarm.peer("trains", steps=10**6, slow=0.01, odd="state")
        trains.until_step(2)
        error = error_of(swarm.peer("comes", steps=3, odd="state"))
        assert error.startswith("SwarmRefused: a newcomer needs the state at ")
        assert "is a Watch, which cannot be sent" in error
        trains.until_step(trains.step + 3)


def test_a_wrong_secret_is_refused(busy: Busy, tmp_path: Path) -> None:
    wrong = write_secret(tmp_path)
    error = busy.error_of("stranger", secret=str(wrong))
    assert error.startswith("WrongSecret: ")
    said = busy.anchor.said
    until(lambda: "refused: " in said(), "the anchor's word of the stranger", 10, said)


def test_an_anchor_that_cannot_be_reached_is_named(busy: Busy) -> None:
    [port] = free_ports(1)
    error = busy.error_of("lonely", join=f"127.0.0.1:{port}")
    assert error.startswith("Unreachable: ")
    assert f"127.0.0.1:{port}" in error
