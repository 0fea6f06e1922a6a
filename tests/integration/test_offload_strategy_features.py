"""What else a Lightning user has: schedulers, finetuning, profilers, the Tuner."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner
from support import offload_lightning as ol
from support.products import only_first
from torch import nn
from torch.optim import lr_scheduler

from offload.live.core import load_core
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


def planned(budget: str | None = "70%") -> OffloadStrategy:
    return OffloadStrategy(budget=budget)


def both(make: Any = ol.Module, callbacks: Any = tuple, **options: Any) -> list[ol.Result]:
    """Planned and plain, told apart by nothing."""
    strategy = planned()
    ours = ol.train(strategy, make, callbacks=callbacks(), **options)
    theirs = ol.train("auto", make, callbacks=callbacks(), **options)
    assert ol.differences(theirs, ours) == []
    assert strategy.plan
    return [ours, theirs]


# ---- learning rates ----------------------------------------------------------------------------


class Scheduled(ol.Module):
    def __init__(self, configured: Callable[[Any], Any]) -> None:
        super().__init__()
        self.configured = configured

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return {"optimizer": optimizer, "lr_scheduler": self.configured(optimizer)}


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "epoch": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "step": lambda o: {
        "scheduler": lr_scheduler.OneCycleLR(o, 1e-2, total_steps=18),  # moves the betas too
        "interval": "step",
    },
    "every second step": lambda o: {
        "scheduler": lr_scheduler.LinearLR(o),
        "interval": "step",
        "frequency": 2,
    },
    "plateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0),
        "monitor": "val_loss",
    },
    "plateau of the loss by step": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=1),
        "monitor": "loss_step",
        "interval": "step",
        "strict": False,
    },
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_are_those_of_the_schedule(name: str) -> None:
    ours, _ = both(lambda: Scheduled(SCHEDULES[name]), max_epochs=3)
    assert len(set(ours.rates)) > 1


# ---- accumulation, and what is trained, change in mid-run --------------------------------------


def test_accumulation_that_grows_from_epoch_to_epoch() -> None:
    schedule = {0: 1, 1: 2, 2: 4}
    both(
        callbacks=lambda: [GradientAccumulationScheduler(schedule)],
        max_epochs=3,
        gradient_clip_val=0.1,
    )


class Backbone(ol.Module):
    def __init__(self) -> None:
        super().__init__("sgd")
        self.backbone = self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05, 0.9)


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.enter, pl_module.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[3:], optimizer)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.enter, optimizer)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_finetuning_adds_parameters_to_the_optimizer_in_mid_run(accumulated: int) -> None:
    both(
        Backbone,
        lambda: [Unfreezing()],
        max_epochs=3,
        accumulate_grad_batches=accumulated,
    )


@pytest.mark.filterwarnings("ignore:The provided params to be frozen")
def test_lightnings_backbone_finetuning() -> None:
    both(
        Backbone,
        lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)],
        max_epochs=3,
    )


class Adapter(nn.Module):
    """Low rank, beside a frozen layer: LoRA as peft makes it."""

    def __init__(self, base: Any, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


class Adapted(ol.Module):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.inner = Adapter(block.inner)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


@pytest.mark.parametrize("precision", only_first("bf16-mixed", "32-true"))
def test_low_rank_adapters_beside_frozen_layers(precision: Any) -> None:
    both(Adapted, precision=precision, gradient_clip_val=0.5)


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft", reason="peft is an extra: .[llm]")

    class Peft(ol.Module):
        def __init__(self) -> None:
            super().__init__()
            config = peft.LoraConfig(r=4, target_modules=["inner"], lora_dropout=0.1)
            self.blocks = peft.inject_adapter_in_model(config, self.blocks)

    both(Peft)


# ---- files ------------------------------------------------------------------------------------


def test_checkpoints_in_mid_epoch_are_plain_lightnings(tmp_path: Path) -> None:
    folders = []
    for strategy, name in ((planned(), "ours"), ("auto", "theirs")):
        keep = ModelCheckpoint(
            tmp_path / name, "{step}", every_n_train_steps=2, save_top_k=-1, save_last="link"
        )
        ol.train(strategy, callbacks=[keep], enable_checkpointing=True)
        folders.append(tmp_path / name)
    names = [sorted(file.name for file in folder.iterdir()) for folder in folders]
    assert names[0] == names[1] and len(names[0]) > 5
    for file in names[0]:
        one, other = (torch.load(folder / file, weights_only=False) for folder in folders)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
            assert ol._unequal(part, one[part], other[part]) == [], file


def test_what_is_logged_is_in_the_table_of_plain_lightning(tmp_path: Path) -> None:
    for strategy, name in ((planned(), "ours"), ("auto", "theirs")):
        logger = CSVLogger(tmp_path, name, "")
        ol.train(strategy, logger=logger, callbacks=[LearningRateMonitor()], log_every_n_steps=2)
    tables = [(tmp_path / name / "metrics.csv").read_text() for name in ("ours", "theirs")]
    assert tables[0] == tables[1]
    assert "loss_step" in tables[0]


# ---- the trainer's other switches --------------------------------------------------------------


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
@pytest.mark.filterwarnings("ignore")
def test_profilers_look_on(profiler: str, tmp_path: Path) -> None:
    both(profiler=profiler, default_root_dir=tmp_path, max_steps=8)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_bare_bones() -> None:
    options: dict[str, Any] = {"logger": None, "enable_checkpointing": None, "validate": False}
    options |= {"enable_progress_bar": None, "enable_model_summary": None}
    options |= {"num_sanity_val_steps": None}
    both(barebones=True, **options)


class Forgets(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].state.clear()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_optimizer_that_is_emptied_in_mid_run_begins_anew(kind: str) -> None:
    both(lambda: ol.Module(kind), lambda: [Forgets()], gradient_clip_val=0.1)


def test_time_limits_and_steps() -> None:
    both(callbacks=lambda: [Timer(duration={"hours": 1})], max_steps=5, max_epochs=-1)


@pytest.mark.filterwarnings("ignore")
def test_the_tuner_finds_what_it_finds_without_us(tmp_path: Path) -> None:
    found = []
    for strategy in (OffloadStrategy(), "auto"):
        torch.manual_seed(1)
        module: Any = Tuned()
        trainer = L.Trainer(
            strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, max_epochs=2, default_root_dir=tmp_path,
        )  # fmt: skip
        tuner = Tuner(trainer)
        torch.manual_seed(2)
        rates: Any = tuner.lr_find(module, ol.data(), num_training=20, update_attr=True)
        size = tuner.scale_batch_size(module, datamodule=Sizes(), max_trials=2, steps_per_trial=2)
        torch.manual_seed(3)
        trainer.fit(module, ol.data())
        found.append((rates.results, module.lr, size, module.state_dict()))
    assert ol._unequal("tuned", found[0], found[1]) == []


class Tuned(ol.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)


class Sizes(L.LightningDataModule):
    batch_size = 4

    def train_dataloader(self) -> Any:
        return ol.data(batch=self.batch_size)

    def val_dataloader(self) -> Any:
        return ol.data(20, batch=self.batch_size)


# ---- a saved trainer ----------------------------------------------------------------------------


def test_a_trainer_can_be_saved_after_a_fit_and_goes_on_elsewhere(tmp_path: Path) -> None:
    ours = ol.train(planned())
    path = tmp_path / "trainer.pt"
    torch.save(ours.trainer, path)
    loaded: L.Trainer = torch.load(path, weights_only=False)
    module = loaded.lightning_module
    for trainer, of in ((ours.trainer, ours.module), (loaded, module)):
        torch.manual_seed(5)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(of, ol.data())
    again = ol.Result(module, loaded, loaded.strategy, ours.metrics, ours.rates)
    assert ol.differences(ours, again) == []
    assert loaded.global_step == ours.trainer.global_step == 24
    assert again.strategy.plan.budget == ours.strategy.plan.budget


def test_a_step_by_hand_after_the_fit_runs_as_without_us() -> None:
    """Nobody would end a live step there, and the next trainer could not begin."""
    ours = ol.train(planned())
    ours.module.log = lambda *_, **__: None  # type: ignore[method-assign]
    ours.strategy.training_step(next(iter(ol.data())), 0)
    assert not load_core().is_in_step()
    ol.train(planned())
