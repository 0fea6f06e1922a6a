"""What the tests of swarms share: the usual run, alone and in company."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.swarms.ledger import account
from benchmarks.swarms.swarm import Nursery, Process, Swarm

LANES, SAMPLES, REUSE, STEPS = 8, 200, 2, 30
"""A pass has 13 steps, the last of them a short one: so there are two whole ones."""
CHECKED = {
    "steps": STEPS, "val": True, "trainer": {"val_check_interval": 4}, "sum": "exact",
}  # fmt: skip
HEARTBEAT = 20.0
"""Long, so that a busy machine expels nobody. Where a test waits for it, it says so."""


def fault(do: str, at: str, step: int, **more: Any) -> dict[str, Any]:
    return {"do": do, "at": at, "step": step, **more}


def hold(step: int, until: int) -> dict[str, Any]:
    """Wait before this step until there are so many members."""
    return fault("hold", "attempt", step, until=until)


def by_step(peer: Process) -> dict[int, str]:
    """The digest of the weights after each step, as a peer has written it down."""
    lines = peer.out.joinpath("digests.txt").read_text().splitlines()
    return {int(step): digest for step, digest in (line.split() for line in lines)}


def peer_alone(folder: Path, nursery: Nursery, settings: dict[str, Any]) -> Process:
    """Train in one process that never has peers, to the end."""
    with Swarm(folder, nursery) as swarm:
        peer = swarm.peer("one", **settings)
        assert peer.result()["error"] == ""
    return peer


def is_subset(some: dict[int, str], of: dict[int, str]) -> bool:
    """Whether some steps have the weights that they have in another run."""
    return bool(some) and all(of.get(step) == digest for step, digest in some.items())


def assert_exact(
    peers: Sequence[Process], steps: int = STEPS, reuses: Sequence[int] = (REUSE,)
) -> None:
    """No lane and no sample is lost or taken twice, and no two peers had different weights."""
    found = account([peer.out for peer in peers], LANES, steps, SAMPLES, reuses)
    assert found.clean, found
    assert found.serves
