"""What members tell of themselves: samples, seconds and bytes, in everybody's log alike."""

from pathlib import Path
from typing import Any

from support.elastic_swarms import HEARTBEAT, fault, hold

from benchmarks.swarms.peer import Net
from benchmarks.swarms.swarm import Nursery, Process, Swarm
from trainers.elastic.peer.step_log import read_lines

BATCH, STEPS = 32, 12
USUAL: dict[str, Any] = {"steps": STEPS, "batch": BATCH, "samples": BATCH * STEPS, "reuse": 1}


def told_by(peer: Process) -> dict[int, dict[str, tuple[int, float, int]]]:
    """Samples, seconds and bytes of each member at each step, as one of them has logged it."""
    lines = read_lines(peer.out / "elastic" / f"{peer.name}.jsonl")
    return {
        line["commit"]: {name: tuple(told) for name, *told in line["peers"]}
        for line in lines
        if "commit" in line
    }


def test_bytes_and_samples_of_every_member_agree_with_what_was_reduced(
    nursery: Nursery, tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        faults = [hold(0, 2), hold(1, 2)]
        stays = swarm.peer("a", **USUAL, faults=faults)
        killed = swarm.peer("b", **USUAL, faults=[*faults, fault("kill", "before_reduce", 8)])
        assert stays.result()["error"] == ""
        killed.wait()
    at_one, at_other = told_by(stays), told_by(killed)
    assert sorted(at_one) == list(range(STEPS)) and sorted(at_other) == list(range(8))
    assert all(at_one[step] == at_other[step] for step in range(8))
    half = 4 * sum(p.numel() for p in Net({}).parameters()) // 2
    expected = {"a": 0, "b": 0}
    for step in range(8):
        told = at_one[step]
        assert {name: sent for name, (_, _, sent) in told.items()} == expected
        assert sum(samples for samples, _, _ in told.values()) == BATCH
        for name, (samples, seconds, _) in told.items():
            assert (samples > 0) == (seconds > 0)
            # Who has a lane sends half of its sums to the other one; both send the half they add.
            expected[name] += half * (2 if samples else 1)
    # Alone, it computes all samples and sends nothing more.
    for step in range(9, STEPS):
        samples, _, sent = at_one[step]["a"]
        assert samples == BATCH
        assert sent == at_one[8]["a"][2]
        assert [*at_one[step]] == ["a"]
