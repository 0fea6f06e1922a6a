"""A peer whose lanes and updates run as plans has the bits of one without a budget.

one peer with a budget   =   one peer without: logs, weights, optimizer state, digests of commits
two peers, one of each kind, and a replay of theirs
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from planned_peer import CLIPS, OPTIMIZERS, Classifier, Ran, alone, assert_equal, replayed

from offload import BudgetTooSmall
from offload.sizes import parse_size
from trainers.elastic.errors import CannotBeElastic

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def least(out: Path, **more: Any) -> int:
    """Return the smallest budget, which the refusal of a smaller one names."""
    with pytest.raises(BudgetTooSmall, match="raise the budget to") as refused:
        alone(out, 64, 1, **more)
    return refused.value.needed


@pytest.mark.parametrize(
    "optimizer, clip, budget",
    [("sgd", "norm", "60%"), ("adamw", "value", "100%"), ("adamw", "norm", "least")],
)
def test_a_peer_with_a_budget_has_the_bits_of_one_without(
    optimizer: str, clip: str, budget: str, tmp_path: Path
) -> None:
    more = {"optimizer": optimizer, **CLIPS[clip]}
    nbytes: Any = least(tmp_path / "refused", **more) if budget == "least" else budget
    plain = alone(tmp_path / "plain", None, **more)
    planned = alone(tmp_path / "planned", nbytes, **more)
    assert_equal(planned, plain)
    assert planned.digests == plain.digests
    assert any("val_loss" in logs for logs in plain.watch.logs)
