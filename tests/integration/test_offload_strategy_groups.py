"""Gradient accumulation with one graph for all micro-batches, against plain Lightning."""

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from offload import BudgetTooSmall, MemoryTooSmall, Runner
from trainers import OffloadStrategy
from trainers.offloading.steps import groups

sys.path.insert(0, str(Path(__file__).parent))
import offload_lightning as ol

one_thread = ol.one_thread
pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]
WIDTH = 136


@pytest.fixture(autouse=True)
def taken_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow these tiny models are so."""
    monkeypatch.setattr(groups, "FASTER", 1e9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(self.inner(x).relu()))


class Module(L.LightningModule):
    """Dropout, statistics, a metric, what is logged by step and by epoch, a scheduler."""

    def __init__(self, lora: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(12, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 5)
        self.mean = MeanMetric()
        if lora:
            self.blocks.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.blocks(self.enter(x))), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.mean(loss.detach())
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        self.log_dict({"mean x": x.mean(), "one": 1.0}, on_step=True, on_epoch=True)
        return {"loss": loss, "x": x}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.head(self.blocks(self.enter(batch[0])))
        self.log("val_loss", nn.functional.cross_entropy(out, batch[1]))

    def configure_optimizers(self) -> Any:
        used = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(used, 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Kept(L.pytorch.loggers.Logger):  # type: ignore[name-defined]
    """All that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    name = version = "kept"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def train(strategy: Any = "auto", *, make: Any = Module, loader: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    module, logger = make(), Kept()
    given: dict[str, Any] = {
        "max_epochs": 3,
        "accumulate_grad_batches": 2,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "accelerator": "cpu",
    }
    trainer = L.Trainer(strategy=strategy, logger=logger, **{**given, **options})
    torch.manual_seed(4)
    trainer.fit(module, ol.data(88) if loader is None else loader(), ol.data(20))
    metrics: dict[str, Any] = {f"callback {k}": v for k, v in trainer.callback_metrics.items()}
    metrics |= {f"logged {k}": v for k, v in trainer.logged_metrics.items()}
    metrics |= {"lines": logger.lines, "metric": module.mean.metric_state}
    metrics |= {"random": torch.get_rng_state()}
    return ol.Result(module, trainer, trainer.strategy, metrics, [])


def smallest(options: dict[str, Any]) -> int:
    with pytest.raises(BudgetTooSmall) as refused:
        train(OffloadStrategy(budget=64), **options)
    return refused.value.needed


def together(result: Any) -> set[int]:
    """How many micro-batches were run at a time."""
    parts = [plan.part for plan in result.strategy.plans]
    return {int(part.split()[0]) for part in parts if part.endswith("micro-batches")}


# 11 batches, the last one as large as the others: the last group of 2 and 3 and 4 is smaller.
RUNS: dict[str, dict[str, Any]] = {
    "2": {},
    "3": {"accumulate_grad_batches": 3},
    "4": {"accumulate_grad_batches": 4},
    "clipped": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    "lora": {"make": functools.partial(Module, True), "accumulate_grad_batches": 3},
    "bf16": {"precision": "bf16-mixed", "accumulate_grad_batches": 3},
    "last batch smaller": {"loader": functools.partial(ol.data, 85), "accumulate_grad_batches": 4},
    "limited": {"limit_train_batches": 7, "accumulate_grad_batches": 3},
    "max_steps": {"max_epochs": -1, "max_steps": 8},
}


@functools.cache
def plain(name: str) -> Any:
    return train(**RUNS[name])


FULL = [pytest.param(name, "least", marks=pytest.mark.full) for name in ("clipped", "lora")]


@pytest.mark.parametrize(
    ("name", "budget"), [*((name, "60%") for name in RUNS), ("4", "least"), *FULL]
)
def test_a_run_is_plain_lightnings_to_the_last_bit(name: str, budget: str) -> None:
    bytes_or_share: Any = smallest(RUNS[name]) if budget == "least" else budget
    ours = train(OffloadStrategy(budget=bytes_or_share, check_first_steps=0), **RUNS[name])
    assert ol.differences(plain(name), ours) == []
    assert max(together(ours)) == RUNS[name].get("accumulate_grad_batches", 2)
    assert "at a time" in ours.strategy.explain()
    assert ours.strategy.plan.device_bytes <= ours.strategy.plan.budget[0]


def test_steps_that_are_checked_first_are_run_one_by_one() -> None:
    ours = train(OffloadStrategy(budget="60%"), **RUNS["3"])
    assert ol.differences(plain("3"), ours) == []
    assert together(ours) == {3, 2}


class Endless(IterableDataset[Any]):
    """Nobody knows how many."""

    def __iter__(self) -> Iterator[Any]:
        yield from ol.data(88, 8)


def test_a_loader_without_a_length_ends_with_a_smaller_group() -> None:
    def loader() -> Any:
        return DataLoader(Endless(), batch_size=None)

    options = {"loader": loader, "accumulate_grad_batches": 3}
    ours = train(OffloadStrategy(budget="60%", check_first_steps=0), **options)
    assert ol.differences(train(**options), ours) == []
    assert together(ours) == {3, 2}


class Refilled(IterableDataset[Any]):
    """One batch, again and again with other contents."""

    def __iter__(self) -> Iterator[Any]:
        one: Any = None
        for x, y in ol.data(88, 8):
            one = (x.clone(), y.clone()) if one is None else one
            one[0].copy_(x)
            one[1].copy_(y)
            yield one


def test_a_loader_may_use_the_memory_of_its_batches_again() -> None:
    def loader() -> Any:
        return DataLoader(Refilled(), batch_size=None)

    options = {"loader": loader, "accumulate_grad_batches": 3, "limit_train_batches": 9}
    ours = train(OffloadStrategy(budget="60%", check_first_steps=0), **options)
    assert together(ours) == {3}
    assert ol.differences(train(**options), ours) == []


# ---- where somebody could see it -----------------------------------------------------------------


class Looks(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:  # type: ignore[override]
        pass


class LooksItself(Module):
    def on_train_batch_start(self, *_: Any) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"callbacks": [Looks()]}, "callback Looks has on_train_batch_end (.*groups.py:"),
        ({"make": LooksItself}, "LooksItself overrides on_train_batch_start (.*groups.py:"),
        ({"val_check_interval": 3}, "validation every 3 batches"),
        ({"max_time": "01:00:00:00"}, "Timer"),
    ],
)
def test_where_somebody_looks_between_micro_batches_they_are_run_one_by_one(
    options: dict[str, Any], why: str
) -> None:
    ours = train(OffloadStrategy(budget="60%", check_first_steps=0), **options)
    assert together(ours) == set()
    line = ours.strategy.explain().splitlines()[-1]
    assert re.search(f"one by one: .*{why.replace('(', '[(]')}", line)
    assert ol.differences(train(**options), ours) == []


def test_validation_that_is_due_between_two_groups_is_no_reason() -> None:
    options = {"val_check_interval": 4}
    ours = train(OffloadStrategy(budget="60%", check_first_steps=0), **options)
    assert together(ours) == {2}
    assert ol.differences(train(**options), ours) == []


def test_weights_that_are_resident_are_no_reason_to_wait() -> None:
    ours = train(OffloadStrategy(budget="100%", check_first_steps=0))
    assert together(ours) == set()
    assert "all weights are resident" in ours.strategy.explain()
    ours = train(OffloadStrategy(check_first_steps=0))
    assert "all weights are resident" in ours.strategy.explain()


def test_what_is_not_faster_by_the_simulator_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "FASTER", 0.0)
    ours = train(OffloadStrategy(budget="60%", check_first_steps=0))
    assert together(ours) == set()
    assert "one by one: together" in ours.strategy.explain()
    assert ol.differences(plain("2"), ours) == []


class Noisy(Dataset[Any]):
    """Draws of its own, between the batches."""

    def __len__(self) -> int:
        return 88

    def __getitem__(self, number: int) -> Any:
        return torch.randn(12), torch.tensor(number % 5)


def test_random_numbers_of_the_loader_are_drawn_where_they_were() -> None:
    def loader() -> Any:
        return DataLoader(Noisy(), 8)

    ours = train(OffloadStrategy(budget="60%", check_first_steps=0), loader=loader)
    assert together(ours) == set()
    assert ol.differences(train(loader=loader), ours) == []
    assert "the step and the loader both draw random numbers" in ours.strategy.explain()


class Later(Noisy):
    """Not at once: after five batches of the second epoch."""

    calls = 0

    def __getitem__(self, number: int) -> Any:
        Later.calls += 1
        x = torch.full((12,), float(number))
        return torch.randn(12) if Later.calls > 88 + 36 else x, torch.tensor(number % 5)


def test_a_loader_that_begins_to_draw_in_mid_run_is_told_once() -> None:
    Later.calls = 0
    strategy = OffloadStrategy(budget="60%", check_first_steps=0)
    with pytest.warns(UserWarning, match="drawn between two micro-batches") as warned:
        ours = train(strategy, loader=lambda: DataLoader(Later(), 8))
    assert len([w for w in warned if "micro-batches" in str(w.message)]) == 1
    assert together(ours) == {2}
    assert "the step and the loader both draw random numbers" in ours.strategy.explain()


class Stops(Module):
    """In the middle of a group, as a signal would."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and self.trainer.fit_loop.epoch_loop.total_batch_idx == 18:
            self.trainer.should_stop = True
        return batch


def test_a_run_that_stops_in_the_middle_of_a_group_has_run_what_came() -> None:
    options = {"make": Stops, "accumulate_grad_batches": 4}
    ours = train(OffloadStrategy(budget="60%", check_first_steps=0), **options)
    assert together(ours) == {4, 3}
    assert ol.differences(train(**options), ours) == []


def test_arenas_that_the_machine_refuses_leave_the_run_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trainers.offloading.hardware import target

    def refuse(plan: Any, engine: str, **more: Any) -> Any:
        if len({task.turn for task in plan.graph.tasks}) > 1:
            raise MemoryTooSmall("no memory", needed=2, left=1)
        return Runner(plan, engine, **more)

    monkeypatch.setattr(target, "Runner", refuse)
    ours = train(OffloadStrategy(budget="60%", check_first_steps=0))
    assert together(ours) == set()
    assert "one by one: together: no memory" in ours.strategy.explain()
    assert ol.differences(plain("2"), ours) == []


def test_callbacks_of_lightning_are_no_reason(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import (
        EarlyStopping,
        LearningRateMonitor,
        ModelCheckpoint,
        TQDMProgressBar,
    )

    found = []
    for name, strategy in (
        ("ours", OffloadStrategy(budget="60%", check_first_steps=0)),
        ("theirs", "auto"),
    ):
        keep = ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1)
        callbacks = [keep, EarlyStopping("val_loss", patience=1), LearningRateMonitor("step"),
                     TQDMProgressBar()]  # fmt: skip
        more = {"enable_checkpointing": True, "enable_progress_bar": True}
        result = train(strategy, callbacks=callbacks, accumulate_grad_batches=3, **more)
        found.append(result)
    ours, theirs = found
    assert together(ours) == {3, 2}
    assert ol.differences(theirs, ours) == []
    names = sorted(file.name for file in (tmp_path / "theirs").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "ours").iterdir())
    for name in names:
        one, other = (torch.load(tmp_path / who / name, weights_only=False)
                      for who in ("ours", "theirs"))  # fmt: skip
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
            assert ol._unequal(part, other[part], one[part]) == []


class SavesItself(Module):
    """In the middle of a group, from where nobody would think of it."""

    file = Path()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and self.trainer.fit_loop.epoch_loop.batch_idx == 7:
            self.trainer.save_checkpoint(self.file)
        return batch


def test_a_checkpoint_in_the_middle_of_a_group_has_what_came_before_it(tmp_path: Path) -> None:
    found = []
    for name, strategy in (
        ("ours", OffloadStrategy(budget="60%", check_first_steps=0)),
        ("theirs", "auto"),
    ):
        SavesItself.file = tmp_path / name
        result = train(strategy, make=SavesItself, accumulate_grad_batches=3)
        found.append((result, torch.load(SavesItself.file, weights_only=False)))
    (ours, one), (theirs, other) = found
    assert together(ours) == {3, 2}
    assert ol.differences(theirs, ours) == []
    for part in ("state_dict", "optimizer_states", "loops", "global_step"):
        assert ol._unequal(part, other[part], one[part]) == []


def test_an_error_in_the_middle_of_a_group_leaves_the_last_steps_weights() -> None:
    class Fails(Module):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if self.trainer.training and self.trainer.fit_loop.epoch_loop.total_batch_idx == 18:
                raise RuntimeError("no more")
            return batch

    modules = []

    def make() -> Module:
        modules.append(Fails())
        return modules[-1]

    for strategy in (OffloadStrategy(budget="60%", check_first_steps=0), "auto"):
        with pytest.raises(RuntimeError, match="no more"):
            train(strategy, make=make, accumulate_grad_batches=4)
    parameters = [dict(module.named_parameters()) for module in modules]
    assert ol._unequal("", *parameters) == []
