"""`strategy.move_to(device=)`: a training goes on on another device.

"cuda:1" is the CPU by another name, and with another engine: torch.device("cpu", 1), serial.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from integration.test_budget_moves import STEPS, At, Call, Trained, assert_same
from lightning.pytorch.callbacks import ModelCheckpoint
from support.accelerators import here
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jobs.fleet_jobs import QUIET
from offload import BudgetTooSmall, MemoryTooSmall, OffloadError
from offload.memory.host_memory import HostMemoryLeft
from trainers import OffloadStrategy
from trainers.offloading.moves import target_on
from trainers.offloading.run import StrategyRun
from trainers.steps import target
from trainers.steps.target import Target

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
ENGINES = ("threads", "serial", "threads")


@dataclass(frozen=True, slots=True)
class OfAnotherMake(Target):
    @property
    def name(self) -> str:
        return "another make"


@pytest.fixture(autouse=True)
def gpus_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU is the CPU, with an engine of ENGINES."""
    set_gpus(monkeypatch, Target)


def set_gpus(monkeypatch: pytest.MonkeyPatch, make: type[Target]) -> None:
    def target_of_gpu(run: StrategyRun, device: torch.device) -> Target:
        if device.type != "cuda":
            return target_on(run, device)
        here = torch.device("cpu", device.index) if device.index else torch.device("cpu")
        target = target_on(run, here)
        return make(here, ENGINES[device.index], gate=target.gate, make_runner=target.make_runner)

    monkeypatch.setattr("trainers.offloading.moves.target_on", target_of_gpu)


class Logged(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def fit(
    call: Call,
    budget: str | int | None = "100%",
    **trainer: Any,
) -> tuple[dict[str, torch.Tensor], L.Trainer]:
    torch.manual_seed(1)
    module = Logged()
    strategy = OffloadStrategy(budget)
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(8 * STEPS, 16, generator=numbers)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)
    made = L.Trainer(
        max_epochs=1, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **here(),
        **{"callbacks": [At(call)], "enable_checkpointing": False, **trainer},
    )  # fmt: skip
    made.fit(module, data, data)
    return module.state_dict(), made


def stay(strategy: OffloadStrategy, step: int) -> None:
    pass


@pytest.fixture
def undisturbed() -> dict[str, torch.Tensor]:
    return fit(stay)[0]


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"val_check_interval": 3}, marks=pytest.mark.full),
        {"accumulate_grad_batches": 2},
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.full),
        {"gradient_clip_val": 0.1},
    ],
    ids=["plain", "validated", "accumulated", "bf16", "clipped"],
)
def test_a_training_that_goes_from_device_to_device_has_the_bits_of_one_that_stays(
    more: Any,
) -> None:
    stays, at_rest = fit(stay, **more)
    asked: list[Future[Any]] = []
    engines: list[str] = []
    wishes = [("cuda:1", "70%"), ("cuda:2", "same"), ("cuda:0", None), ("cuda:1", "80%")]

    def move(strategy: OffloadStrategy, step: int) -> None:
        engines.append(strategy.target.engine)
        if step in (1, 3, 5, 7):
            device, budget = wishes[step // 2]
            asked.append(strategy.move_to(budget, device))

    moves, trainer = fit(move, **more)
    assert_same(stays, moves)
    assert trainer.global_step == STEPS // more.get("accumulate_grad_batches", 1)
    assert {*engines} == {*ENGINES}
    assert sum(one.exception() is None for one in asked) >= 3
    for key, value in at_rest.callback_metrics.items():
        assert torch.equal(value, trainer.callback_metrics[key])


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_moves_in_any_order_keep_the_bits(seed: int, undisturbed: Any) -> None:
    """To budgets and devices by chance, several at once, and as soon as others are made."""
    chance = random.Random(seed)
    asked: list[Future[Any]] = []

    def move(strategy: OffloadStrategy, step: int) -> None:
        for _ in range(chance.randint(0, 2) if step else 0):
            budget = chance.choice(["70%", "80%", "100%", None])
            device = chance.choice([None, "cuda:0", "cuda:1", "cuda:2"])
            asked.append(strategy.move_to(budget, device))

    moves, trainer = fit(move)
    assert_same(undisturbed, moves)
    assert trainer.global_step == STEPS
    assert sum(one.exception() is None for one in asked) >= 4


def test_a_move_without_room_is_refused_before_anything_moves(
    undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Future[Any]] = []
    plans: list[Any] = []

    def move(strategy: OffloadStrategy, step: int) -> None:
        if step == 3:
            with pytest.raises(BudgetTooSmall):
                strategy.move_to(100, "cuda:1")
            asked.append(strategy.move_to("70%", "cuda:1"))
            monkeypatch.setattr(target, "memory_left", lambda: HostMemoryLeft(1000, "a small host"))
        if step == 5:
            monkeypatch.undo()
            assert strategy.target.engine == "threads"
        if step >= 3:
            plans.append(strategy.plan)

    with pytest.warns(UserWarning, match="stays where it is, because it cannot move: .* of cpu"):
        moves, _ = fit(move)
    assert_same(undisturbed, moves)
    assert isinstance(asked[0].exception(0), MemoryTooSmall)
    assert len({id(plan) for plan in plans}) == 1


def test_a_device_of_another_make_is_reported_to_have_other_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_gpus(monkeypatch, OfAnotherMake)

    def move(strategy: OffloadStrategy, step: int) -> None:
        if step == 2:
            strategy.move_to(device="cuda:1")

    with pytest.warns(UserWarning, match="from cpu to another make: the weights are equal"):
        fit(move)


def test_scores_of_checkpoints_go_on(tmp_path: Path) -> None:
    kept = []
    for call in (stay, lambda s, n: s.move_to(device="cuda:1") if n == 3 else None):
        best = ModelCheckpoint(tmp_path / str(len(kept)), monitor="seen", save_top_k=2)
        fit(
            call, val_check_interval=2, enable_checkpointing=True, callbacks=[At(call), best]
        )  # fmt: skip
        kept.append(best)
    assert kept[0].best_model_score == kept[1].best_model_score
    assert len(kept[0].best_k_models) == len(kept[1].best_k_models) == 2


def test_what_cannot_move_says_what_to_do() -> None:
    with pytest.raises(OffloadError, match="give the device to the Trainer"):
        OffloadStrategy("100%").move_to(device="cuda:1")
    struck: list[str] = []

    def refused(words: str, call: Callable[[], object]) -> None:
        with pytest.raises((OffloadError, ValueError), match=words) as error:
            call()
        struck.append(str(error.value))

    def move(strategy: OffloadStrategy, step: int) -> None:
        if step != 3:
            return
        refused("names no other place than the run has", strategy.move_to)
        refused("names no other place", lambda: strategy.move_to(device="cpu"))
        refused("device='nowhere'", lambda: strategy.move_to(device="nowhere"))
        refused("runs on the CPU and on CUDA devices", lambda: strategy.move_to(device="meta"))
        refused("budget: ", lambda: strategy.move_to("much", "cuda:1"))
        guests = strategy.high_priority(nn.Linear(2, 2), budget=100_000)
        refused("end their blocks", lambda: strategy.move_to(device="cuda:1"))
        with guests:
            pass

    fit(move)
    assert len(struck) == 6
