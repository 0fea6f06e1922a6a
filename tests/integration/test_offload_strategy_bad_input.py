"""Bad input, bad luck and odd batches under OffloadStrategy: told, or as in plain Lightning."""

import os
import re
import signal
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from support import offload_lightning as ol
from torch import nn
from torch.utils.data import DataLoader

from offload import BudgetTooSmall
from offload.running.stage import Stage
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


NOTHING: Any = []


def planned() -> OffloadStrategy:
    return OffloadStrategy(budget="70%")


# ---- what is asked for -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget", [0, -1, True, 1.5, float("nan"), float("inf"), "0", "8", "", "1e9", "0 %", "-5%"]
)
def test_what_is_no_budget_is_told_at_once(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget") as refused:
        OffloadStrategy(budget=budget)
    assert repr(budget) in str(refused.value)
    assert "8GiB" in str(refused.value) or "80%" in str(refused.value)


@pytest.mark.parametrize("budget", ["NaN%", "nan %", "inf%", "x%", "%"])
def test_what_is_no_share_is_told_at_once(budget: str) -> None:
    with pytest.raises(ValueError, match="such as 80%"):
        OffloadStrategy(budget=budget)


def test_a_gigabyte_is_less_than_a_gibibyte_and_more_than_all_is_all() -> None:
    budgets = [
        ol.train(OffloadStrategy(budget=b), max_steps=1).strategy.plan.budget[0]
        for b in ("8GB", "8GiB", "110%", "100%")
    ]
    assert budgets[0] == 8 * 10**9 < budgets[1] == 8 * 2**30
    assert budgets[2:] == [None, None]


def test_a_budget_of_a_few_bytes_says_how_many_are_needed() -> None:
    with pytest.raises(BudgetTooSmall, match=r"KiB are needed at task .*raise the budget to"):
        ol.train(OffloadStrategy(budget=8))


def test_a_share_that_is_too_small_says_which_one_is_enough() -> None:
    with pytest.raises(BudgetTooSmall, match=r"1% is a share of .*: give \d+%$") as refused:
        ol.train(OffloadStrategy(budget="1%"))
    (least,) = re.findall(r"give (\d+)%", str(refused.value))
    assert ol.train(OffloadStrategy(budget=f"{least}%"), max_steps=1).strategy.plans
    with pytest.raises(BudgetTooSmall):
        ol.train(OffloadStrategy(budget=f"{int(least) - 1}%"))


class NoOptimizer(ol.Module):
    def configure_optimizers(self) -> Any:
        return None


class Foreign(ol.Module):
    """Trains nothing that the loss depends on."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)


class Empty(ol.Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": []}], 0.1)


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer")
@pytest.mark.parametrize("make", [Foreign, Empty, NoOptimizer])
def test_an_optimizer_without_the_modules_parameters_is_no_trouble(make: Any) -> None:
    found = []
    for strategy in (planned(), "auto"):
        torch.manual_seed(0)
        module = make()
        trainer = L.Trainer(strategy=strategy, **ol.ONE_QUIET_EPOCH)
        trainer.fit(module, ol.data())
        found.append((module.state_dict(), trainer.callback_metrics))
    assert ol._unequal("", *found) == []


@pytest.mark.filterwarnings("ignore:.*Total length of")
@pytest.mark.filterwarnings("ignore:.*No training batches|.*limit_train_batches")
@pytest.mark.parametrize("options", [{"limit_train_batches": 0}, {"loader": DataLoader(NOTHING)}])
def test_a_run_without_batches_ends_as_it_began(options: dict[str, Any]) -> None:
    strategy = planned()
    ours = ol.train(strategy, **options)
    assert ol.differences(ol.train("auto", **options), ours) == []
    with pytest.raises(Exception, match="it is made in the first step"):
        strategy.explain()


# ---- numbers that are none ---------------------------------------------------------------------


class Explodes(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        loss = torch.where(batch[1].sum() == 17, loss * float("inf"), loss)
        self.log("loss", loss, on_step=True)
        return loss


def test_a_run_stops_at_a_loss_that_is_not_finite_where_plain_lightning_does() -> None:
    stopped = []
    for strategy in (planned(), "auto"):
        stop = EarlyStopping("loss", check_finite=True, patience=99, check_on_train_epoch_end=True)
        torch.manual_seed(3)
        result = ol.train(strategy, Explodes, callbacks=[stop], max_epochs=4, max_steps=-1)
        stopped.append((result.trainer.global_step, result.metrics["callback loss"].isfinite()))
    assert stopped[0] == stopped[1]


# ---- Ctrl-C ------------------------------------------------------------------------------------


class Saves(L.Callback):
    """What is there when the run is stopped."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.file)


@contextmanager
def struck(monkeypatch: pytest.MonkeyPatch, at: int, times: int = 1) -> Iterator[None]:
    """Ctrl-C within the run of a step's nodes."""
    real, count = Stage.run, 0

    def run(stage: Stage, *given: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return real(stage, *given)

    monkeypatch.setattr(Stage, "run", run)
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("at", [3, 6])
def test_ctrl_c_in_mid_step_leaves_a_checkpoint_of_whole_steps(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = OffloadStrategy(budget="70%")
    with struck(monkeypatch, at), pytest.raises(SystemExit):
        ol.train(strategy, callbacks=[Saves(tmp_path / "struck.ckpt")], max_epochs=3)
    found = torch.load(tmp_path / "struck.ckpt", weights_only=False)
    steps = found["global_step"]
    assert 0 < steps <= at
    plain = ol.train("auto", max_steps=steps, max_epochs=3)
    assert ol._unequal("", found["state_dict"], plain.module.state_dict()) == []
    optimizer = plain.trainer.optimizers[0].state_dict()
    assert ol._unequal("", found["optimizer_states"][0], optimizer) == []
    # From there it goes on as plain Lightning does.
    goes_on = {"ckpt_path": tmp_path / "struck.ckpt", "seed": 8}
    assert ol.differences(ol.train("auto", **goes_on), ol.train(planned(), **goes_on)) == []


def test_a_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ol.Module()
    with struck(monkeypatch, 3, times=2), pytest.raises(SystemExit):
        ol.train(planned(), lambda: module)
    for tensor in module.state_dict().values():
        tensor.resize_(tensor.shape)
    assert torch.is_grad_enabled()


def test_the_handler_of_the_user_is_there_again_after_every_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    ol.train(planned())
    assert signal.getsignal(signal.SIGINT) is before


# ---- batches that are mappings -----------------------------------------------------------------


class Encoded(UserDict[str, Any]):
    """As transformers' BatchEncoding: its items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Attributes(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert type(batch) is Encoded
        return nn.functional.cross_entropy(self(batch.x), batch["more"]["y"])


def encoded() -> DataLoader[Any]:
    def put(batch: Any) -> Any:
        x, y = (torch.stack(part) for part in zip(*batch, strict=True))
        return Encoded({"x": x, "more": {"y": y}})

    return DataLoader(ol.data().dataset, ol.BATCH, collate_fn=put)


def test_batches_may_be_mappings_that_are_made_of_a_dict() -> None:
    strategy = planned()
    options: dict[str, Any] = {"make": Attributes, "validate": False}
    ours = ol.train(strategy, loader=encoded(), **options)
    assert ol.differences(ol.train("auto", loader=encoded(), **options), ours) == []
    assert strategy.plan
