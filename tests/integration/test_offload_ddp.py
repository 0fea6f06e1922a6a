"""Two gloo processes, one plan each: the bits of torch's DDP."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("offload_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by run."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{n}.json").read_text()) for n in range(2)]


@pytest.mark.timeout(420)
def test_every_run_is_plain_ddps_to_the_last_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["runs"]) == 15
        assert {n: r["differences"] for n, r in rank["runs"].items() if r["differences"]} == {}


def test_all_ranks_have_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    weights = [[run["weight"] for run in rank["runs"].values()] for rank in ranks]
    assert weights[0] == weights[1]


def test_gradients_are_averaged_in_buckets_inside_the_planned_step(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert rank["runs"]["plain, no budget"]["all_reduces"] == 1
        assert rank["runs"]["plain, 60 %"]["all_reduces"] > 2  # of 5 KiB


def test_what_one_rank_cannot_plan_all_train_eagerly_as_plain_ddp(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert rank["eager"]["differences"] == []
        assert rank["eager"]["planned"] == "there is no plan: this run trains eagerly"


def test_with_a_budget_all_ranks_refuse_it(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "this run cannot be planned" in rank["eager"]["refused"]
        assert "offload_ranks.py" in rank["eager"]["refused"]  # the user's line
        assert "rank 1 has other gradients" in rank["eager"]["other heads"]
    assert "rank 1: " in ranks[0]["eager"]["refused"]
