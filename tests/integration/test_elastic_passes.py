"""What peers say of passes into which no newcomer can come."""

from pathlib import Path

import pytest

from benchmarks.swarms.swarm import Nursery, Swarm


@pytest.mark.parametrize(("samples", "times"), [(32, 1), (64, 0)])
def test_a_peer_says_once_that_passes_of_one_step_let_nobody_in(
    nursery: Nursery, tmp_path: Path, samples: int, times: int
) -> None:
    with Swarm(tmp_path, nursery) as swarm:
        peer = swarm.peer("a", steps=3, samples=samples, reuse=1)
        assert peer.result()["step"] == 3
        assert peer.said().count("a pass has one step, and no run goes on exactly") == times
