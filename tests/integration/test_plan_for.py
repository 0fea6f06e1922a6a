"""`strategy.plan_for`: the plan of an update that nothing runs, as training makes it."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from support.accelerators import GPU, here, on_each_accelerator

from offload import BudgetTooSmall, Plan, Runner
from trainers import OffloadStrategy

pytestmark = [
    pytest.mark.usefixtures("core"),
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
]


class Manual(ol.Module):
    """It optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Made(Exception):
    """All plans are made."""


class Plans(L.Callback):
    """Asks for the plans of the first batch, and of its first samples, before anything runs."""

    def __init__(self, sizes: tuple[int, ...] = (ol.BATCH,)) -> None:
        self.sizes = sizes
        self.found: list[Plan] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        before = {name: value.clone() for name, value in pl_module.named_parameters()}
        for size in self.sizes:
            strategy: Any = trainer.strategy
            self.found.append(strategy.plan_for([part[:size] for part in batch], batch_idx))
        for name, value in pl_module.named_parameters():
            assert torch.equal(value.cpu(), before[name].cpu()) and value.grad is None
        assert not any(each.state for each in trainer.optimizers)
        raise Made


def strategy(budget: str | None) -> OffloadStrategy:
    on_gpu = here()["accelerator"] == GPU
    return OffloadStrategy(budget, optimizer="device" if on_gpu and budget else "auto")


def planned(plans: Plans, budget: str | None, **options: Any) -> list[Plan]:
    with pytest.raises(Made):
        ol.train(strategy(budget), **options, callbacks=[plans])
    return plans.found


@on_each_accelerator
@pytest.mark.parametrize("budget", [None, "60%"])
@pytest.mark.parametrize(
    ("make", "options"),
    [(ol.Module, {}), (ol.Module, {"accumulate_grad_batches": 2}), (Manual, {})],
    ids=["plain", "accumulated", "by hand"],
)
def test_it_is_the_plan_that_training_makes_and_no_kernel_runs(
    make: Callable[[], ol.Module], options: dict[str, Any], budget: str | None,
    monkeypatch: pytest.MonkeyPatch, accelerator: str,
) -> None:  # fmt: skip
    def run(*_: Any) -> None:
        raise AssertionError("a kernel ran")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", run)
        [plan] = planned(Plans(), budget, make=make, **options)
    if budget is None:  # then the first step of training has no plan
        assert plan.budget == {0: None} and plan.peak_bytes > 0
        return
    trained = ol.train(strategy(budget), make=make, max_steps=1, **options).strategy.plan
    assert [task.name for task in plan.graph.tasks] == [task.name for task in trained.graph.tasks]
    assert plan.smallest_bytes == trained.smallest_bytes
    assert plan.budget == trained.budget


def test_a_share_is_one_of_the_largest_batch() -> None:
    large, small = planned(Plans((8, 2)), "80%")
    [alone] = planned(Plans((2,)), "80%")
    assert small.budget == large.budget != alone.budget


def test_a_budget_that_is_too_small_is_refused_with_what_is_needed() -> None:
    with pytest.raises(BudgetTooSmall, match=r"are needed at task .*, but the budget is 1\.0 KiB"):
        ol.train(strategy("1KiB"), callbacks=[Plans()])
