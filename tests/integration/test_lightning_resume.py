"""A ReuseLoader in a Trainer goes on from a checkpoint with the same batches."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.lightning_runs import (
    BATCHES,
    SAMPLES,
    Longer,
    Module,
    Pictures,
    Validated,
    make_loader,
    make_trainer,
)
from support.products import every_value
from torch.utils.data import DataLoader

from loaders.errors import StateError
from perfect import LoaderCallback, Phase, PhaseSwitch, Schedule

END = torch.empty(0, 3, 6, 6, dtype=torch.uint8)


class Saver(L.Callback):
    """Checkpoints after every batch, validation and epoch: where ModelCheckpoint does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"batch{trainer.global_step}.ckpt")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"valid{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"epoch{trainer.global_step}.ckpt")


def fit(ckpt: Path | None, *more: L.Callback, module: Module | None = None, **how: Any) -> Module:
    """With everything made anew, as another process would."""
    options = how.pop("loader", {})
    module = module or Module()
    trainer = make_trainer(*more, LoaderCallback(), **how)
    val = DataLoader(Pictures(), SAMPLES) if isinstance(module, Validated) else None
    trainer.fit(module, make_loader(**options), val, ckpt_path=ckpt, weights_only=True)
    return module


def assert_tail(mine: Module, whole: Module, path: Path) -> None:
    step = int(path.stem[5:])
    assert mine.ids == whole.ids[step:], path.stem
    assert torch.equal(torch.cat([*mine.pixels, END]), torch.cat([*whole.pixels[step:], END]))


@pytest.mark.parametrize("estimates, limit", every_value([False, True], [1.0, 5, 0.5]))
def test_a_resume_from_any_checkpoint_serves_the_same_tail(
    tmp_path: Path, estimates: bool, limit: float
) -> None:
    whole = fit(None, Saver(tmp_path), module=Module(estimates), limit_train_batches=limit)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == len(whole.ids) + 3
    for path in paths:
        mine = fit(path, module=Module(estimates), limit_train_batches=limit)
        assert_tail(mine, whole, path)


@pytest.mark.parametrize(
    "how",
    [
        {"loader": {"mode": "block"}},
        {"loader": {"mode": "immediate", "reaugment": False}},
        {"max_steps": 40, "max_epochs": -1},
        {"module": Validated},
        {"module": Validated, "max_steps": 40, "max_epochs": -1},
        {"module": Validated, "val_check_interval": 5},
        {"module": Validated, "val_check_interval": 12, "check_val_every_n_epoch": None},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=lambda how: "-".join(map(str, how)),
)
def test_a_resume_serves_the_same_tail_however_it_is_trained(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    make = how.pop("module", Module)
    whole = fit(None, Saver(tmp_path), module=make(), **how)
    paths = sorted(tmp_path.iterdir())
    for path in [p for p in paths if p.stem[:5] != "batch" or int(p.stem[5:]) % 4 < 2]:
        assert_tail(fit(path, module=make(), **how), whole, path)


def test_a_resume_goes_on_where_passes_became_longer(tmp_path: Path) -> None:
    how = {"loader": {"reuse": 1}}
    whole = fit(None, Longer(), Saver(tmp_path), **how)
    assert len(whole.ids) == 6 + 11 + 17
    for path in sorted(tmp_path.iterdir()):
        # Lightning calls no on_train_epoch_end if it goes on after the last batch: Longer does
        # nothing then.
        if path.stem not in ("batch6", "batch17"):
            assert_tail(fit(path, Longer(), **how), whole, path)


def test_a_checkpoint_of_another_loader_is_refused(tmp_path: Path) -> None:
    fit(None, Saver(tmp_path), max_epochs=1)
    with pytest.raises(StateError, match="seed=3, this loader has seed=4"):
        fit(tmp_path / "epoch17.ckpt", loader={"seed": 4})


def test_a_checkpoint_from_before_the_callback_is_taken_as_lightning_takes_it(
    tmp_path: Path,
) -> None:
    module = Module()
    make_trainer(Saver(tmp_path)).fit(module, make_loader())
    path = tmp_path / "batch20.ckpt"
    assert_tail(fit(path), module, path)


# ---- with phases --------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [(), (LoaderCallback,), (LoaderCallback, PhaseSwitch)])
def test_phases_go_on_from_every_checkpoint_that_lightning_may_write(
    tmp_path: Path, beside: tuple[type, ...]
) -> None:
    """After the last batch of a pass, after the validation that follows, and at the pass's end.
    ModelCheckpoint writes there unless it is told otherwise."""
    phases = [
        Phase("pretrain", reuse=3, passes=2, lr=Schedule("constant", 0.05)),
        Phase("finetune", passes=2, lr=Schedule("linear", 0.05), reset_optimizer=True),
    ]

    def phased(ckpt: Path | None, *more: L.Callback) -> tuple[Module, PhaseSwitch]:
        switch, module = PhaseSwitch(phases), Validated()
        callbacks: list[L.Callback] = [each() for each in beside if each is LoaderCallback]
        callbacks.insert(len(callbacks) if PhaseSwitch in beside else 0, switch)
        val = DataLoader(Pictures(), SAMPLES)
        trainer = make_trainer(*callbacks, *more, max_epochs=-1)
        trainer.fit(module, make_loader(), val, ckpt_path=ckpt, weights_only=True)
        return module, switch

    whole, told = phased(None, Saver(tmp_path))
    assert len(whole.ids) == 2 * BATCHES + 2 * 6
    ends = (BATCHES, 2 * BATCHES, 2 * BATCHES + 6)
    for path in sorted(tmp_path.iterdir()):
        if int(path.stem[5:]) in (*ends, 5, ends[0] + 1, ends[1] - 1, ends[1] + 2):
            mine, switch = phased(path)
            assert_tail(mine, whole, path)
            assert all(map(torch.equal, mine.parameters(), whole.parameters())), path.stem
            assert switch.records == told.records
