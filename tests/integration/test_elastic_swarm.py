"""Peers come, die and go, and every step is that of one process that never had peers."""

from dataclasses import dataclass
from typing import Any

import pytest
from support.elastic_swarms import CHECKED, HEARTBEAT, STEPS, assert_exact, by_step, fault, hold

from benchmarks.swarms.swarm import Nursery, Process, Swarm


@dataclass(frozen=True)
class Told:
    """A run that has ended."""

    peers: list[Process]
    results: dict[str, dict[str, Any]]
    said: list[str]


@pytest.fixture(scope="module")
def alone(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One process that never had peers."""
    with Swarm(tmp_path_factory.mktemp("alone"), nursery) as swarm:
        peer = swarm.peer("one", **CHECKED)
        return Told([peer], {"one": peer.result()}, swarm.told)


@pytest.fixture(scope="module")
def changing(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Three begin; one is killed in the middle of a reduce; one comes in the middle of the first
    pass, right after a validation; one leaves; one comes in the second pass."""
    folder = tmp_path_factory.mktemp("changing")
    with Swarm(folder, nursery, heartbeat=HEARTBEAT) as swarm:
        begin, first, second = hold(0, 3), hold(9, 3), hold(18, 3)
        usual = {**CHECKED, "faults": [begin, first, second]}
        killed = {**CHECKED, "faults": [begin, fault("kill", "mid_reduce", 5)]}
        leaves = {**CHECKED, "faults": [begin, first, fault("term", "batch_end", 14)]}
        peers = [swarm.peer("a", **usual), swarm.peer("b", **killed), swarm.peer("c", **leaves)]
        peers[1].wait()
        peers.append(swarm.peer("d", **{**usual, "faults": [second]}))
        peers[2].wait()
        peers.append(swarm.peer("e", **CHECKED))
        results = {peer.name: peer.result() for peer in peers if peer.name in "ade"}
        swarm.replay(peers, **CHECKED).wait()
    return Told(swarm.peers, results, swarm.told)


def test_every_step_has_the_weights_of_one_process_that_never_had_peers(
    alone: Told, changing: Told
) -> None:
    expected = by_step(alone.peers[0])
    assert sorted(expected) == list(range(1, STEPS + 1))
    for peer in changing.peers:
        found = by_step(peer)
        assert found == {step: expected[step] for step in found}, peer.name
    assert max(by_step(changing.peers[1])) == 5
    assert {name: min(by_step(peer)) for name, peer in zip("de", changing.peers[3:5], strict=True)}
    assert changing.results["d"]["digest"] == alone.results["one"]["digest"]


def test_no_sample_is_lost_and_none_is_taken_twice(changing: Told) -> None:
    assert_exact(changing.peers[:5])


def test_schedules_losses_and_validations_are_those_of_one_process(
    alone: Told, changing: Told
) -> None:
    expected = alone.results["one"]
    assert len(expected["validated"]) >= 6
    for name, result in changing.results.items():
        assert (result["step"], result["error"]) == (STEPS, ""), name
        assert result["rates"] == expected["rates"][-len(result["rates"]) :]
        assert result["losses"] == expected["losses"][-len(result["losses"]) :]
        last = len(result["validated"])
        assert result["validated"] == expected["validated"][-last:]
    assert changing.results["a"]["validated"] == expected["validated"]


def test_a_replay_of_the_logs_has_the_same_weights(changing: Told) -> None:
    replay = changing.peers[-1].result()
    assert (replay["error"], replay["compared"]) == ("", STEPS)
    assert replay["digest"] == changing.results["a"]["digest"]


def test_nothing_of_a_swarm_is_left_at_its_end(changing: Told) -> None:
    for result in changing.results.values():
        assert result["threads"] == ["MainThread"]
    assert "all peers have ended the run" in changing.said[-1]


def test_fast_sums_keep_survivors_equal_and_replay_whoever_did_what(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> None:
    usual: dict[str, Any] = {"steps": 16, "reuses": {0: 3}, "samples": 100}
    with Swarm(tmp_path_factory.mktemp("fast"), nursery, heartbeat=HEARTBEAT) as swarm:
        stays = swarm.peer("a", **usual, faults=[hold(0, 2), hold(10, 2)])
        killed = swarm.peer("b", **usual, faults=[hold(0, 2), fault("kill", "before_reduce", 6)])
        killed.wait()
        comes = swarm.peer("c", **usual)
        ended, joined = stays.result(), comes.result()
        assert ended["digest"] == joined["digest"]
        assert by_step(killed).items() <= by_step(stays).items()
        assert by_step(comes).items() <= by_step(stays).items()
        replay = swarm.replay(**usual).result()
        assert (replay["error"], replay["compared"]) == ("", 16)
        assert replay["digest"] == ended["digest"]
