"""Two gloo processes work together within a step: eager's bits, or a refusal by name."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import collective_ranks

SCRIPT = Path(collective_ranks.__file__)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{n}.json").read_text()) for n in range(2)]


def test_collectives_of_a_prefill_have_eagers_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["forward"] == {name: [] for name in collective_ranks.FORWARD}


def test_gradients_through_collectives_have_eagers_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["backward"] == {name: [] for name in collective_ranks.BACKWARD}


def test_what_ranks_do_in_an_order_of_their_own_is_refused_by_name(
    ranks: list[dict[str, Any]],
) -> None:
    for rank, name in zip(ranks, ("send", "recv_"), strict=True):
        assert f"c10d::{name} has no place in an order that all ranks share" in rank["sent"]
        assert "has no place in an order that all ranks share" in rank["sent in a prefill"]
        for said in (rank["sent"], rank["sent in a prefill"]):
            assert re.match(r"collective_ranks.py:\d+ in sent: ", said)


def test_a_prefill_of_distributed_tensors_has_eagers_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "FSDPLinear, a module of fully_shard" in rank["captured before its first call"]
    assert [rank["captured"] for rank in ranks] == [[[], []]] * 2
    assert [rank["distributed tensors"] for rank in ranks] == [[[], []]] * 2
