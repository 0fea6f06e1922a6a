"""`strategy.move_to`: a training goes on in another budget, with the bits of one that stays."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import lightning as L
import pytest
import torch
from support.accelerators import CPU, GPU, here, kept_of_each, on_each_accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jobs.fleet_jobs import QUIET
from offload import BudgetTooSmall, MemoryTooSmall, OffloadError
from offload.memory import room
from offload.memory.host_memory import HostMemoryLeft
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
STEPS = 10
Call = Callable[[OffloadStrategy, int], object]


class Trained(L.LightningModule):
    """Dropout, statistics of BatchNorm and AdamW: a step that is lost or made twice is found. No
    bias comes before the BatchNorm, where its gradient would be of rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(256, 4),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


class At(L.Callback):
    """Calls something of the strategy before some steps."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, OffloadStrategy)
        self._call(trainer.strategy, batch_idx)


def fit(
    call: Call,
    budget: str | int | None = "100%",
    callbacks: type[At] = At,
    optimizer: str | None = None,
    **trainer: Any,
) -> tuple[dict[str, torch.Tensor], OffloadStrategy, L.Trainer]:
    torch.manual_seed(1)
    module = Trained()
    chosen = {} if optimizer is None else {"optimizer": optimizer}
    strategy = OffloadStrategy(budget, **chosen)
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(8 * STEPS, 16, generator=numbers)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)
    made = L.Trainer(
        max_epochs=1, **here(), strategy=strategy, logger=False,
        callbacks=[callbacks(call)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **trainer,
    )  # fmt: skip
    made.fit(module, data, data)
    return module.state_dict(), strategy, made


def no_move(strategy: OffloadStrategy, step: int) -> None:
    pass


@kept_of_each
def weights_of_one_that_stays() -> dict[str, torch.Tensor]:
    return fit(no_move)[0]


@pytest.fixture
def undisturbed(accelerator: str) -> dict[str, torch.Tensor]:
    return weights_of_one_that_stays()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    "more, accelerator",
    [
        ({}, CPU),
        ({"val_check_interval": 3}, CPU),
        ({"accumulate_grad_batches": 2}, CPU),
        pytest.param(
            {"val_check_interval": 3, "accumulate_grad_batches": 2}, GPU, marks=pytest.mark.gpu
        ),
    ],
    indirect=["accelerator"],
)
def test_a_training_that_moves_at_every_step_has_the_bits_of_one_that_stays(
    more: Any, accelerator: str
) -> None:
    stays, _, _ = fit(no_move, **more)
    moved: list[Future[Any]] = []
    budgets = ["70%", "100%", "80%", None]

    def move(strategy: OffloadStrategy, step: int) -> None:
        if step:
            moved.append(strategy.move_to(budgets[step % 4]))

    moves, _, trainer = fit(move, **more)
    assert_same(stays, moves)
    window = more.get("accumulate_grad_batches", 1)
    assert trainer.global_step == STEPS // window
    done = [one for one in moved if one.exception() is None]
    assert len(done) == STEPS - 1 - window  # those of the last window came too late
    assert any(one.result().nbytes > 0 for one in done)
    assert all(one.result().seconds >= 0 for one in done)


@pytest.mark.gpu
@pytest.mark.parametrize("accelerator", [GPU], indirect=True)
def test_updates_that_move_to_the_host_and_back_have_the_same_weights_but_for_rounding(
    undisturbed: Any, accelerator: str
) -> None:
    """As users have it: `optimizer="auto"`. Without updates on the host no plan keeps 60%."""
    on_host: list[bool] = []

    def move(strategy: OffloadStrategy, step: int) -> None:
        if step:
            on_host.append(any(task.lane == "host" for task in strategy.plan.graph.tasks))
            strategy.move_to(["60%", "100%"][step % 2])

    moves, _, _ = fit(move, optimizer="auto")
    assert {*on_host} == {True, False}
    torch.testing.assert_close(moves, undisturbed)


@on_each_accelerator
def test_another_thread_plans_while_the_training_goes_on(
    undisturbed: Any, accelerator: str
) -> None:
    asked: list[Future[Any]] = []
    threads: list[threading.Thread] = []
    plans: list[int] = []

    def ask(strategy: OffloadStrategy) -> None:
        asked.append(strategy.move_to("70%"))

    def move(strategy: OffloadStrategy, step: int) -> None:
        if step == 2:
            threads.append(threading.Thread(target=ask, args=(strategy,)))
            threads[0].start()
        if step == 5:
            threads[0].join(60.0)
        if step:
            plans.append(strategy.plan.device_bytes)

    moves, _, _ = fit(move)
    assert_same(undisturbed, moves)
    assert asked[0].result(0).nbytes > 0
    assert plans[-1] < plans[0]


@on_each_accelerator
def test_a_move_without_room_is_refused_before_anything_moves(
    undisturbed: Any, monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    asked: list[Future[Any]] = []
    budgets: list[Any] = []

    def move(strategy: OffloadStrategy, step: int) -> None:
        if step == 3:
            monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(1000, "a small host"))
            asked.append(strategy.move_to("70%"))
        if step == 5:
            monkeypatch.undo()
        if step:
            budgets.append(strategy.plan.budget)

    with pytest.warns(UserWarning, match="stays where it is, because it cannot move"):
        moves, _, _ = fit(move)
    assert_same(undisturbed, moves)
    error = asked[0].exception(0)
    assert isinstance(error, MemoryTooSmall)
    assert "a small host. Nothing has moved, and the old plan goes on" in str(error)
    assert budgets and all(budget == budgets[0] for budget in budgets)


def test_a_budget_that_no_plan_keeps_is_refused_at_once(undisturbed: Any) -> None:
    struck: list[BaseException] = []

    def move(strategy: OffloadStrategy, step: int) -> None:
        if step == 3:
            for budget in (100, "much"):
                with pytest.raises((BudgetTooSmall, ValueError)) as error:
                    strategy.move_to(budget)
                struck.append(error.value)

    moves, _, _ = fit(move)
    assert_same(undisturbed, moves)
    assert isinstance(struck[0], BudgetTooSmall)
    assert "budget: " in str(struck[1])


def test_an_error_in_a_move_reaches_its_caller_and_refuses_the_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Future[Any]] = []

    def fail(*_: Any) -> None:
        raise RuntimeError("no such luck")

    def move(strategy: OffloadStrategy, step: int) -> None:
        if step == 3:
            asked.extend(strategy.move_to("60%") for _ in range(2))
            monkeypatch.setattr("offload.live.runner_plans.RunnerPlans.move_to", fail)

    with pytest.raises(RuntimeError, match="no such luck"):
        fit(move)
    first, second = (future.exception(0) for future in asked)
    assert isinstance(first, RuntimeError) and isinstance(second, OffloadError)


def test_a_move_before_the_first_step_or_after_the_last_says_what_to_do() -> None:
    with pytest.raises(OffloadError, match="give the budget to the strategy"):
        OffloadStrategy("100%").move_to("60%")
    asked: list[Future[Any]] = []

    class Late(At):
        def on_train_batch_end(
            self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            assert isinstance(trainer.strategy, OffloadStrategy)
            if batch_idx == STEPS - 1:
                asked.append(trainer.strategy.move_to("60%"))

    fit(no_move, callbacks=Late)
    with pytest.raises(OffloadError, match="the run ended before the step that would have moved"):
        asked[0].result(0)
