"""Averages over ranks in a planned step, in a group of one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.live_training import LiveTraining
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore

from offload.errors import StepError
from offload.graph.costs import Costs
from offload.graph.taskgraph import RANKS
from trainers.offloading.ranks import Ranks, difference


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers)


def named(module: nn.Module) -> dict[Any, str]:
    return {p: name for name, p in module.named_parameters()}


def averaging(module: nn.Module) -> LiveTraining:
    """Steps whose gradients are averaged before the update."""
    optimizer, names = torch.optim.AdamW(module.parameters(), 0.01), named(module)
    over = Ranks(1, tuple(names), 10_000)

    def average(*_: object) -> None:
        over.average({p: p.grad for p in names if p.grad is not None}, names)

    optimizer.register_step_pre_hook(average)
    return LiveTraining(module, nn.functional.mse_loss, optimizer)


BATCH = torch.zeros(8, 32), torch.ones(8, 32)


def test_a_plan_counts_and_tells_what_goes_to_the_other_ranks() -> None:
    with averaging(network()) as step:
        step(*BATCH)
        plan = step.session.plan
    assert plan is not None
    sums = [task for task in plan.graph.tasks if task.lane == RANKS]
    assert sum(task.traffic for task in sums) == 6 * (32 + 1) * 32 * 4
    assert [Costs(ranks=1e6).of_task(task) for task in sums] == [
        pytest.approx(1e-5 + task.traffic / 1e6) for task in sums
    ]
    (line,) = [line for line in plan.explain().splitlines() if line.startswith("ranks")]
    assert "24.8 KiB of each rank in 3 collectives" in line


def test_a_rank_with_other_gradients_is_told_by_its_number_and_theirs() -> None:
    said = difference([("8 of a", "9 of b"), ("8 of a", "9 of b"), ("8 of a", "5 of c")])
    assert "rank 2 has other gradients" in said
    assert "5 of c, against 9 of b" in said
    assert difference([("8 of a",), ("8 of a",)]) == ""


def test_a_collective_that_fails_names_the_rank_that_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection closed by peer\nat some line")

    module = network()
    with averaging(module) as step:
        step(*BATCH)
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        monkeypatch.setattr(distributed, "all_gather", broken)
        with pytest.raises(
            StepError, match=r"rank 0 waited for the others.*closed by peer"
        ) as told:
            step(*BATCH)
        assert "are those of the step before" in "".join(told.value.__notes__)
        assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
