"""An upgrade of Lightning that takes a private name away fails here, and names it.

The tables have a row for each name of `trainers/lightning_seams.py`: it is there, and says in a fit
of two batches what is so.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

import trainers.lightning_seams as s


class _Asks(L.Callback):
    """In the middle of a fit: what each seam says there."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        said = self.said
        said["should_update_logs"] = s.should_update_logs(trainer)
        said["logged_step"] = s.logged_step(trainer)
        said["results"] = type(s.results(trainer.fit_loop.epoch_loop)).__name__
        with s.logging_as(module, "training_step"):
            said["logging_as"] = module._current_fx_name
        s.log_for_batch(trainer, torch.ones(3, 32))
        module.log("of a batch", 1.0, on_step=False, on_epoch=True)
        said["log_for_batch"] = s.results(trainer.fit_loop.epoch_loop).batch_size
        said["combined_loader"] = len(s.combined_loader(trainer).flattened)
        said["data_source"] = s.data_source(trainer).instance is trainer.train_dataloader
        said["is_accumulating"] = s.is_accumulating(trainer)
        said["is_pass_over"] = s.is_pass_over(trainer)
        said["is_validation_due"] = s.is_validation_due(trainer)
        steps = trainer.global_step
        s.make_update(trainer, torch.ones(2, 32), 1)
        said["make_update"] = trainer.global_step - steps
        said["before_batch_transfer"] = s.before_batch_transfer(module, 7)
        said["reload_epoch"] = s.reload_epoch(trainer)
        said["checkpoint_now"] = {"loops", "optimizer_states"} <= s.checkpoint_now(trainer).keys()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        s.set_reload_epoch(trainer, -5)
        self.said["set_reload_epoch"] = s.reload_epoch(trainer)
        s.forget_loader(trainer)
        self.said["forget_loader"] = s.combined_loader(trainer)


IN_A_FIT = {
    "should_update_logs": True,
    "logged_step": 1,
    "results": "_ResultCollection",
    "logging_as": "training_step",
    "log_for_batch": 3,
    "combined_loader": 1,
    "data_source": True,
    "is_accumulating": False,
    "is_pass_over": True,
    "is_validation_due": False,
    "make_update": 1,
    "before_batch_transfer": 7,
    "reload_epoch": 0,
    "set_reload_epoch": -5,
    "forget_loader": None,
    "checkpoint_now": True,
}
"""Of a fit of two batches, at the end of the second."""
OUTSIDE: dict[str, Callable[[], bool]] = {
    "DeviceHolder": lambda: issubclass(L.LightningModule, s.DeviceHolder),
    "set_module_device": lambda: _module_device() == torch.device("meta"),
    "begin_with_checkpoint": lambda: _begun_with_checkpoint() == 3,
}


def _module_device() -> torch.device:
    module = BoringModel()
    s.set_module_device(module, torch.device("meta"))
    assert module.layer.weight.device.type == "cpu"
    return module.device


class _Given(SingleDeviceStrategy):
    """Begins with a checkpoint that is in no file."""

    given: dict[str, Any]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        s.begin_with_checkpoint(trainer, self.given)


class _Takes(L.Callback):
    """Takes a checkpoint at the end of a fit."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.taken = s.checkpoint_now(trainer)


def _begun_with_checkpoint() -> int:
    """The step at which a fit begins that goes on after a checkpoint of three steps."""
    loader = torch.utils.data.DataLoader(torch.ones(8, 32), num_workers=0)
    takes, strategy = _Takes(), _Given("cpu")
    settings: Any = {
        "accelerator": "cpu", "limit_val_batches": 0, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    L.Trainer(max_steps=3, callbacks=[takes], **settings).fit(BoringModel(), loader)
    strategy.given = takes.taken
    trainer = L.Trainer(max_steps=3, strategy=strategy, **settings)
    trainer.fit(BoringModel(), loader)
    return trainer.global_step


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    asks = _Asks()
    module = BoringModel()
    L.Trainer(
        default_root_dir=tmp_path_factory.mktemp("fit"), callbacks=[asks], accelerator="cpu",
        limit_train_batches=2, limit_val_batches=0, max_epochs=1, log_every_n_steps=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(torch.ones(4, 32), num_workers=0))  # fmt: skip
    return asks.said


@pytest.mark.parametrize("name", IN_A_FIT)
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_lightning_says_in_a_fit_what_we_need_to_know(name: str, said: dict[str, Any]) -> None:
    assert said[name] == IN_A_FIT[name]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_lightning_has_what_we_need_of_it(name: str) -> None:
    assert OUTSIDE[name]()


def test_an_attribute_that_is_gone_is_named_with_the_version() -> None:
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace())
    for ask, name in ((s.data_source, "_data_source"), (s.forget_loader, "_combined_loader")):
        with pytest.raises(AttributeError) as caught:
            ask(trainer)
        said = str(caught.value)
        assert L.__version__ in said and s.TESTED in said and f"no attribute '{name}'" in said
