"""A LoaderCallback in a swarm: passes that become longer, newcomers, deaths, and a checkpoint."""

import csv
from pathlib import Path
from typing import Any

import pytest
from support.elastic_swarms import HEARTBEAT, assert_exact, by_step, fault, hold

from benchmarks.swarms.swarm import Nursery, Process, Swarm, until

STEPS = 36
USUAL: dict[str, Any] = {
    "steps": STEPS, "sum": "exact", "loader_callback": True, "logged": True,
    "trainer": {"log_every_n_steps": 4},
}  # fmt: skip
REUSES = (2, 3, 1)
"""Each pass is longer or shorter than the one before it."""
CHANGING: dict[str, Any] = {**USUAL, "reuses": {0: REUSES[1], 1: REUSES[2]}}
PASSES = [13, 32, STEPS]
"""The steps after which they end; the last one has no time to."""


def alone(nursery: Nursery, folder: Path, settings: dict[str, Any]) -> Process:
    """One process that never had peers."""
    with Swarm(folder, nursery) as swarm:
        peer = swarm.peer("one", **settings)
        assert peer.result()["error"] == ""
    return peer


@pytest.fixture(scope="module")
def changing(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Process:
    return alone(nursery, tmp_path_factory.mktemp("changing"), CHANGING)


@pytest.fixture(scope="module")
def saving(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """Its passes have 13 steps, and it writes a checkpoint after each step."""
    return alone(nursery, tmp_path_factory.mktemp("saving"), USUAL | {"checkpoints": 1})


def logged(peer: Process) -> list[dict[str, str]]:
    """The rows of a peer's logger that have the loader's counters."""
    with next(peer.out.glob("**/metrics.csv")).open() as file:
        return [row for row in csv.DictReader(file) if row["loader/decoded"]]


def test_lengths_of_passes_and_weights_are_those_of_one_process_whoever_comes_and_dies(
    nursery: Nursery, changing: Process, tmp_path: Path
) -> None:
    expected = by_step(changing)
    assert sorted(expected) == list(range(1, STEPS + 1))
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        begin, again = hold(0, 2), hold(20, 2)
        stays = swarm.peer("a", **CHANGING, faults=[begin, again])
        until(lambda: "a has come" in swarm.told, "a", 60, stays.said)  # so it has the first rank
        dies = swarm.peer("b", **CHANGING, faults=[begin, fault("kill", "after_reduce", 15)])
        dies.wait()
        comes = swarm.peer("c", **CHANGING)  # into the middle of the longer pass
        results = [stays.result(), comes.result()]
    for peer in swarm.peers:
        found = by_step(peer)
        assert found.items() <= expected.items(), peer.name
    assert 13 < min(by_step(comes)) < 32
    assert [result["passes"] for result in results] == [PASSES, PASSES[1:]]
    assert_exact(swarm.peers, STEPS, reuses=REUSES)
    assert len(logged(stays)) == STEPS // 4


@pytest.mark.parametrize("step", [10, 13, 20])
def test_a_swarm_of_which_all_died_goes_on_from_a_checkpoint_also_of_the_end_of_a_pass(
    nursery: Nursery, saving: Process, tmp_path: Path, step: int
) -> None:
    expected = by_step(saving)
    found = next(saving.out.glob(f"checkpoints/*step={step}.ckpt"))
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        goes_on: dict[str, Any] = {**USUAL, "strategy": {"checkpoint": str(found)}}
        # Right at the beginning of a pass nobody gives the state.
        peers = [swarm.peer(name, **goes_on, faults=[hold(step + 2, 2)]) for name in "ab"]
        results = [peer.result() for peer in peers]
    assert [result["error"] for result in results] == [""] * 2
    for peer, result in zip(peers, results, strict=True):
        again = by_step(peer)
        assert again == {n: expected[n] for n in range(min(again), STEPS + 1)}
        assert result["passes"][-2:] == [26, STEPS]
    assert min(min(by_step(peer)) for peer in peers) == step + 1
