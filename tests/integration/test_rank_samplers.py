"""Two gloo processes: a sampler's share is not shared again, and ranks that differ are refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "rank_samplers.py"
SAMPLES = 101


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rank_samplers")
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{n}.json").read_text()) for n in range(2)]


@pytest.mark.parametrize(
    ("case", "left_out", "twice"),
    [
        ("torch's own", 0, 1),
        ("a subclass", 0, 1),
        ("a subclass in a DataLoader", 0, 1),
        ("a wrapper", 0, 1),
        ("a shard", 1, 0),
        ("a shard inside", 1, 0),
        ("unrepeated", 0, 0),
        ("all agree", 0, 1),
        ("no sampler", 0, 1),
        ("other seeds, a sampler that draws nothing", 0, 1),
        ("other seeds for shares", 1, 0),
    ],
)
def test_the_ranks_together_serve_what_the_samplers_say(
    case: str, left_out: int, twice: int, told: list[dict[str, Any]]
) -> None:
    shares = [rank[case] for rank in told]
    assert [type(share) for share in shares] == [list, list], shares
    assert len(set(shares[0]) | set(shares[1])) == SAMPLES - left_out
    assert len(set(shares[0]) & set(shares[1])) == twice


def test_a_loader_that_is_told_to_be_alone_waits_for_nobody(told: list[dict[str, Any]]) -> None:
    assert [len(rank["alone"]) for rank in told] == [10, 50]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "other orders",
            "list draws another order on rank 1 than on rank 0.*num_replicas",
        ),
        ("other lengths", "5 batches on rank 1, but 3 on rank 0.*Sharded"),
        ("unrepeated, one batch less", "5 batches on rank 1, but 6 on rank 0.*Unrepeated"),
        ("other data", "50 samples on rank 1, but 100 on rank 0"),
        ("other seeds", "seed 1 on rank 1, but 0 on rank 0.*without seed= takes that of rank 0"),
        ("one seed given", "seed 5 on rank 1, but"),
        ("other seeds for a sampler", "seed 1 on rank 1, but 0 on rank 0"),
        ("other shuffles", "shuffle False on rank 1, but True on rank 0"),
        ("one rank twice", "2 loaders say that they are rank 0"),
        ("another world", "Sharded draws for rank 0 of 1, but this process is rank"),
        ("another rank", "Sharded draws for rank . of 2, but this process is rank . of 2"),
        ("one is sharded", "draws the share of one rank on rank 0, and the order of all on rank 1"),
    ],
)
def test_ranks_that_differ_are_refused_on_every_rank(
    case: str, said: str, told: list[dict[str, Any]]
) -> None:
    for rank in told:
        assert isinstance(rank[case], str), rank[case]
        assert re.search(said, rank[case]), rank[case]
