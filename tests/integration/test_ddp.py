"""Two gloo processes: disjoint samples, the same number of batches, one decision."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "two_ranks.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{n}.json").read_text()) for n in range(2)]


def test_all_ranks_switch_at_the_same_step_though_they_see_different_curves(
    ranks: list[dict[str, Any]],
) -> None:
    assert ranks[0]["switches"] == ranks[1]["switches"]
    step, reason = ranks[0]["switches"][0]
    assert reason == "plateau"
    assert 0 < step < 8 * 16
    assert ranks[0]["steps"] == ranks[1]["steps"]
    assert ranks[0]["weight"] == ranks[1]["weight"]


def test_ranks_share_a_pass_without_overlap(ranks: list[dict[str, Any]]) -> None:
    # 41 samples on 2 ranks: 21 each, one of them served by both; 16 batches of 4 at reuse 3.
    first_pass = [Counter(i for batch in rank["served"][:16] for i in batch) for rank in ranks]
    assert [set(c.values()) for c in first_pass] == [{3}, {3}]
    assert set(first_pass[0]) | set(first_pass[1]) == set(range(41))
    assert len(set(first_pass[0]) & set(first_pass[1])) == 1
    assert len(ranks[0]["served"]) == len(ranks[1]["served"])
