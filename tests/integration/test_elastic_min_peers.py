"""Members who are too few wait for others where others can come in, and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
from support.elastic_swarms import CHECKED, HEARTBEAT, assert_exact, by_step, fault, peer_alone

from benchmarks.swarms.swarm import Nursery, Process, Swarm

STEPS = 17
USUAL: dict[str, Any] = {**CHECKED, "steps": STEPS}
"""A validation after every fourth step, and the second pass begins with step 13."""


@pytest.fixture(scope="module")
def alone(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """One process that never had peers."""
    return peer_alone(tmp_path_factory.mktemp("alone"), nursery, USUAL)


@pytest.mark.parametrize(
    ("step", "waits_at"),
    [
        pytest.param(6, 6, id="where the state can be given"),
        pytest.param(4, 5, id="right after a validation"),
        pytest.param(13, 14, id="at the beginning of a pass"),
    ],
)
def test_who_is_left_alone_waits_at_the_next_step_at_which_others_can_come_in(
    nursery: Nursery, alone: Process, tmp_path: Path, step: int, waits_at: int
) -> None:
    expected = by_step(alone)
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT, min_peers=2) as swarm:
        stays = swarm.peer("a", **USUAL)
        dies = swarm.peer("b", **USUAL, faults=[fault("kill", "batch_end", step)])
        dies.wait()
        stays.until_step(waits_at)
        comes = swarm.peer("c", **USUAL)
        results = [stays.result(), comes.result()]
    assert [(result["step"], result["error"]) for result in results] == [(STEPS, "")] * 2
    assert by_step(stays) == expected
    assert min(by_step(comes)) == waits_at + 1
    for peer in (dies, comes):
        assert by_step(peer).items() <= expected.items()
    assert_exact(swarm.peers, STEPS)
