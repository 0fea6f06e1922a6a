"""Two gloo processes under a plain Lightning Trainer, without phases."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "plain_ranks.py"
SAVED_AT = 20
# 41 samples on 2 ranks are 21 each: 16 batches of 4 at reuse 3, 11 at the 2 that rank 0 wants.
LENGTHS = [16, 16, 11]

Ranks = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("plain_ranks")
    for checkpoint in ([], [str(folder / "saved.ckpt")]):
        command = [sys.executable, str(SCRIPT), str(folder), str(SAVED_AT), *checkpoint]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return {
        name: [json.loads((folder / f"{name}{n}.json").read_text()) for n in range(2)]
        for name in ("whole", "resumed")
    }


def test_every_rank_is_given_as_many_batches_though_ranks_want_another_reuse(
    ranks: Ranks,
) -> None:
    assert [rank["lengths"] for rank in ranks["whole"]] == [LENGTHS] * 2
    assert [len(rank["served"]) for rank in ranks["whole"]] == [sum(LENGTHS)] * 2
    assert ranks["whole"][0]["weight"] == ranks["whole"][1]["weight"]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_ranks_shares_of_a_pass_are_disjoint_and_complete(ranks: Ranks, epoch: int) -> None:
    first, last = sum(LENGTHS[:epoch]), sum(LENGTHS[: epoch + 1])
    shares = [Counter(i for b in rank["served"][first:last] for i in b) for rank in ranks["whole"]]
    reuse = 2 if epoch == 2 else 3
    assert [set(share.values()) for share in shares] == [{reuse}, {reuse}]
    assert set(shares[0]) | set(shares[1]) == set(range(41))
    # An odd one is served by both, so that they serve as many.
    assert len(set(shares[0]) & set(shares[1])) == 1


def test_a_resume_in_the_middle_of_a_pass_gives_every_rank_its_own_tail(ranks: Ranks) -> None:
    for whole, resumed in zip(ranks["whole"], ranks["resumed"], strict=True):
        assert resumed["served"] == whole["served"][SAVED_AT:]
        assert resumed["weight"] == whole["weight"]
