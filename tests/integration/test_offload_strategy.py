"""OffloadStrategy against plain Lightning: the same bits, at any budget."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.tuner.tuning import Tuner
from support import offload_lightning as ol
from torch.optim import lr_scheduler

from offload.live.core import load_core
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


@pytest.mark.parametrize("clipping", [0.1, None])
def test_a_run_within_the_smallest_budget_is_plain_lightnings(clipping: float | None) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": clipping}
    budget = ol.smallest(**options)
    ours = ol.train(OffloadStrategy(budget=budget), **options)
    assert ol.differences(ol.train(**options), ours) == []
    assert ours.strategy.plan.device_bytes <= budget
    assert all(p.grad is None for p in ours.module.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 3},
        {"fast_dev_run": 2},
        {"overfit_batches": 2},
        {"val_check_interval": 2},
        {"max_epochs": -1, "max_steps": 7},
        {"limit_train_batches": 5, "accumulate_grad_batches": 3},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*overfit")
def test_the_trainers_own_limits_are_kept(options: dict[str, Any]) -> None:
    result = ol.train(OffloadStrategy(budget="60%"), **options)
    assert ol.differences(ol.train(**options), result) == []


def test_test_and_predict_run_after_the_fit() -> None:
    ours, theirs = ol.train(OffloadStrategy(budget="60%")), ol.train()
    for result in (ours, theirs):
        result.trainer.test(result.module, ol.data(20), verbose=False)
        result.trainer.validate(result.module, ol.data(20), verbose=False)
    assert ours.trainer.callback_metrics == theirs.trainer.callback_metrics
    predicted = [
        torch.cat(result.trainer.predict(result.module, ol.data(20)))  # type: ignore[arg-type]
        for result in (ours, theirs)
    ]
    assert torch.equal(*predicted)


def test_a_second_fit_goes_on_from_the_first() -> None:
    ours, theirs = ol.train(OffloadStrategy(budget="60%")), ol.train()
    for result in (ours, theirs):
        result.trainer.fit_loop.max_epochs = 3
        torch.manual_seed(0)
        result.trainer.fit(result.module, ol.data(), ol.data(20))
    assert ol._unequal("", ours.module.state_dict(), theirs.module.state_dict()) == []


def test_afterwards_every_tensor_has_memory_of_its_own() -> None:
    result = ol.train(OffloadStrategy(budget="60%"))
    tensors = [*result.module.state_dict().values()]
    for state in result.trainer.optimizers[0].state.values():
        tensors += [t for t in state.values() if isinstance(t, torch.Tensor)]
    tensors[0].resize_(1)  # what lies in an arena cannot be
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    assert len(storages) == len(tensors)
    assert isinstance(result.trainer.strategy, OffloadStrategy)


def test_callbacks_of_lightning_work(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    def run(strategy: Any, folder: Path) -> tuple[ol.Result, Any]:
        keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)
        callbacks = [keep, EarlyStopping("val_loss", patience=2), LearningRateMonitor()]
        logger = CSVLogger(folder, "", "")
        result = ol.train(
            strategy, callbacks=callbacks, logger=logger, enable_checkpointing=True,
            log_every_n_steps=1, max_epochs=4,
        )  # fmt: skip
        return result, keep

    ours, kept = run(OffloadStrategy(budget="60%"), tmp_path / "ours")
    theirs, also = run("auto", tmp_path / "theirs")
    assert ol.differences(theirs, ours) == []
    assert Path(kept.best_model_path).name == Path(also.best_model_path).name
    tables = [(tmp_path / who / "metrics.csv").read_text() for who in ("ours", "theirs")]
    assert tables[0] == tables[1]
    one, other = (torch.load(k.last_model_path, weights_only=False) for k in (kept, also))
    assert one.keys() == other.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
        assert ol._unequal(part, one[part], other[part]) == []
    sizes = [Path(k.last_model_path).stat().st_size for k in (kept, also)]
    assert abs(sizes[0] - sizes[1]) < 2000  # no arena was saved along


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


# ---- the trainer's other switches --------------------------------------------------------------


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
@pytest.mark.filterwarnings("ignore")
def test_profilers_look_on(profiler: str, tmp_path: Path) -> None:
    both(profiler=profiler, default_root_dir=tmp_path, max_steps=8)


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
