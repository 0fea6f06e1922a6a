"""Peers killed at eight moments of a step, one, two, or all but one: no survivor lacks a sample.

Sums are exact, so every step of a survivor must have the weights of one process alone.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.elastic_swarms import HEARTBEAT, assert_exact, by_step, fault, hold, peer_alone
from support.products import every_value

from benchmarks.swarms.faults import PHASES
from benchmarks.swarms.swarm import Nursery, Swarm, until

STEPS = 14
USUAL: dict[str, Any] = {"steps": STEPS, "sum": "exact", "even": True, "checkpoints": 3}
PEERS = "abcd"
AT = 5


@pytest.fixture(scope="module")
def expected(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The weights of each step in one process that never had peers."""
    return by_step(peer_alone(tmp_path_factory.mktemp("alone"), nursery, USUAL))


@pytest.mark.parametrize("phase, count", every_value(PHASES, (1, 2, 3)))
def test_survivors_of_a_kill_go_on_with_every_sample(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path, phase: str, count: int
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        peers = []
        for number, name in enumerate(PEERS):
            faults = [hold(0, len(PEERS))]
            if number < count:
                # The first peer alone writes checkpoints. The others die right before.
                at = "applied" if phase == "checkpoint" and number else phase
                faults.append(fault("kill", at, AT))
            peers.append(swarm.peer(name, **USUAL, faults=faults))
            # Who comes first has rank 0, and writes checkpoints.
            until(lambda n=name: f"{n} has come" in swarm.told, name, 60, peers[-1].said)
        killed, survivors = peers[:count], peers[count:]
        results = [peer.result() for peer in survivors]
        assert [peer.wait() for peer in killed] == [-9] * count
        for result in results:
            assert (result["step"], result["error"]) == (STEPS, "")
        for peer in survivors:
            assert by_step(peer) == expected
        for peer in killed:
            found = by_step(peer)
            assert AT <= max(found) <= AT + 1
            assert found.items() <= expected.items()
        assert_exact(peers, STEPS)
        kept = {}
        for path in tmp_path.glob("*/checkpoints/*.ckpt"):  # None of them is half a file.
            kept[torch.load(path, weights_only=True)["global_step"]] = path
        # The one that is due at the step at which its writer dies is nobody's.
        assert {3, 9, 12} <= kept.keys() <= {3, 6, 9, 12}
