"""Two gloo processes whose steps are live ones have the bits of torch's DDP."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.offload_ranks import BUDGETS, RUNS

from offload.live.core import why_no_core

SCRIPT = Path(__file__).parents[1] / "support" / "offload_ranks.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by run."""
    if why := why_no_core():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{n}.json").read_text()) for n in range(2)]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("run", [f"{name}, {budget}" for name in RUNS for budget in BUDGETS])
def test_every_run_is_plain_ddps_to_the_last_bit(run: str, ranks: list[dict[str, Any]]) -> None:
    assert [rank[run] for rank in ranks] == [[], []]


def test_a_checkpoint_has_what_plain_ddps_has_and_goes_on_alike(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["resumed"] for rank in ranks] == [[], []]


def test_gradients_are_averaged_in_buckets_inside_the_planned_step(
    ranks: list[dict[str, Any]],
) -> None:
    for tasks in (rank["tasks of ranks"] for rank in ranks):
        assert tasks["plain, 60 %"] > 4  # they compare, and sum 5 KiB each


@pytest.mark.parametrize("budget", BUDGETS)
def test_other_gradients_are_the_same_error_on_all_ranks(
    budget: str, ranks: list[dict[str, Any]]
) -> None:
    zero, one = (rank[f"without search, {budget}"] for rank in ranks)
    assert zero == one
    assert zero.startswith("rank 1 has other gradients in this step than rank 0")


def test_what_only_torchs_ddp_knows_is_left_to_it_or_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["unknown, no budget"] == "it trains"
        said = rank["unknown, 60 %"]
        assert "rank 0: OffloadDDPStrategy does not know the argument init_sync" in said
