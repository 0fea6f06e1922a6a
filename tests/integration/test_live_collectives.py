"""Collectives within a live step have eager's bits by a plan, or are refused by name."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import live_ranks
from support.live_loops import Loop
from support.live_ranks import STEPS
from torch import distributed

from offload.live.core import why_no_core

SCRIPT = Path(live_ranks.__file__)
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    """Runs a part of the script in two processes, once."""
    if why := why_no_core():
        pytest.skip(why)
    told: dict[str, Ranks] = {}

    def run(part: str) -> Ranks:
        if part not in told:
            folder = tmp_path_factory.mktemp(part)
            command = [sys.executable, str(SCRIPT), str(folder), part]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            assert done.returncode == 0, done.stderr
            told[part] = [json.loads((folder / f"rank{n}.json").read_text()) for n in range(2)]
        return told[part]

    return run


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        *(("models", kind) for kind in live_ranks.MODELS),
        *(("calls", kind) for kind in live_ranks.CALLS),
    ],
)
def test_a_step_with_collectives_has_eagers_bits_and_runs_by_a_plan(
    part: str, kind: type[Loop], ranks_of: Callable[[str], Ranks]
) -> None:
    for rank in ranks_of(part):
        assert rank[kind.__name__][:2] == [True, STEPS]


@pytest.mark.parametrize(
    ("part", "kind", "least"),
    [("models", live_ranks.TensorParallel, 4), ("calls", live_ranks.Unused, 2)],
)
def test_collectives_are_tasks_of_all_ranks_also_if_nobody_needs_them(
    part: str, kind: type[Loop], least: int, ranks_of: Callable[[str], Ranks]
) -> None:
    assert [rank[kind.__name__][2] for rank in ranks_of(part)] == [least, least]


def test_a_rank_with_a_session_works_together_with_one_without(
    ranks_of: Callable[[str], Ranks],
) -> None:
    without, within = (rank["alone"] for rank in ranks_of("others"))
    assert [kind[:2] for kind in without] == [[True, 0]] * len(live_ranks.ALONE)
    assert [kind[:2] for kind in within] == [[True, STEPS]] * len(live_ranks.ALONE)


def test_a_step_that_runs_as_issued_issues_the_same_collectives(
    ranks_of: Callable[[str], Ranks],
) -> None:
    for rank in ranks_of("others"):
        assert rank["as issued"][:2] == [True, 0]
        assert rank["without a budget"][0] and rank["without a budget"][1] > 0


def test_what_has_no_order_and_torchs_own_ddp_are_refused_by_name(
    ranks_of: Callable[[str], Ranks],
) -> None:
    ranks = ranks_of("others")
    for rank, name in zip(ranks, ("send", "recv_"), strict=True):
        assert f"c10d::{name} has no place in an order that all ranks share" in rank["pairs"]
        assert "a tensor that is not on cuda:0, which is a DTensor without" in rank["elsewhere"]
        assert "DistributedDataParallel is none of them: call the model and" in rank["DDP"]


@pytest.mark.gpu
def test_collectives_on_a_gpu_run_at_once_between_two_plans() -> None:
    if why := why_no_core():
        pytest.skip(why)
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        equal, planned, tasks = live_ranks.compared(OnAGpu, "100%")
    finally:
        distributed.destroy_process_group()
    assert [equal, planned, tasks] == [True, STEPS, 0]


class OnAGpu(live_ranks.OfRanks):
    """What is summed has been made within the step, and is used within it."""

    DEVICE = "cuda"

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        group = distributed.group.WORLD
        one = live_ranks.functional.all_reduce(x * 2, "sum", group)
        other = x * 3
        work = distributed.all_reduce(other, async_op=True)
        work.wait()
        distributed.broadcast(self.net.first.weight.detach(), 0)
        return super().loss(one + other, y)
