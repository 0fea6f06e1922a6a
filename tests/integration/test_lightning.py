"""A ReuseLoader in a plain Lightning Trainer, without phases, with and without LoaderCallback."""

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from products import every_value
from torch import nn
from torch.utils.data import DataLoader

from loaders import LoaderError, ReuseLoader
from loaders.errors import StateError
from loaders.pixels.augmentation import Chain, Flip, PadCrop
from loaders.stats import LoaderStats
from perfect import LoaderCallback, Phase, PhaseSwitch

SAMPLES, BATCH, REUSE = 22, 4, 3
# 22 samples three times: 16 whole batches of 4 and 2 samples more.
BATCHES = 17


class Pictures:
    """Each is noise of its own, so that what was done to it shows."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, 6, 6), generator=noise, dtype=torch.uint8), index


class Module(L.LightningModule):
    """Anybody's module, which writes down what it was given."""

    def __init__(self, estimates: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3 * 6 * 6, 2)
        self.estimates = estimates
        self.estimated: float = 0
        self.ids: list[list[int]] = []
        self.pixels: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        pictures, ids = batch
        self.ids.append(ids.tolist())
        self.pixels.append(pictures.clone())
        return nn.functional.cross_entropy(self.net(pictures.flatten(1) / 255.0), ids % 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.estimates:
            self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Validated(Module):
    """Writes down how many batches it was trained on when it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.at.append(len(self.ids))


class Data(L.LightningDataModule):
    """Makes a loader whenever it is asked for one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.made: list[ReuseLoader] = []

    def train_dataloader(self) -> ReuseLoader:
        self.made.append(make_loader(**self.options))
        return self.made[-1]


class Rows(DummyLogger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        self.rows.append((step, dict(metrics)))


def make_loader(**options: Any) -> ReuseLoader:
    settings = {"reuse": REUSE, "workers": 2, "seed": 3, "augment": Chain((PadCrop(1), Flip()))}
    return ReuseLoader(Pictures(), BATCH, **settings | options)


def make_trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 3,
        "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1,
    }  # fmt: skip
    return L.Trainer(callbacks=[*callbacks], **settings | options)


def passes_of(ids: list[list[int]], each: int) -> list[Counter[int]]:
    batches = range(0, len(ids), each)
    return [Counter(i for batch in ids[at : at + each] for i in batch) for at in batches]


END = torch.empty(0, 3, 6, 6, dtype=torch.uint8)
WHOLE = Counter(dict.fromkeys(range(SAMPLES), REUSE))


# ---- fit ----------------------------------------------------------------------------------------


def test_an_epoch_is_a_pass_in_another_order_each_time() -> None:
    module = Module()
    make_trainer().fit(module, make_loader())
    assert passes_of(module.ids, BATCHES) == [WHOLE] * 3
    assert len({str(module.ids[at : at + BATCHES]) for at in (0, BATCHES, 2 * BATCHES)}) == 3


def test_a_datamodule_is_asked_once() -> None:
    module, data = Module(), Data()
    make_trainer().fit(module, datamodule=data)
    assert len(data.made) == 1
    assert passes_of(module.ids, BATCHES) == [WHOLE] * 3


@pytest.mark.parametrize(("limit", "batches"), [(5, 5), (0.5, 8), (1.0, BATCHES), (99, BATCHES)])
@pytest.mark.parametrize("callbacks", [[], [LoaderCallback()]], ids=["plain", "callback"])
def test_limit_train_batches_serves_the_beginning_of_each_pass(
    limit: float, batches: int, callbacks: list[L.Callback]
) -> None:
    module, loader = Module(estimates=True), make_loader()
    make_trainer(*callbacks, limit_train_batches=limit).fit(module, loader)
    assert module.estimated == len(module.ids) == 3 * batches
    whole = Module()
    make_trainer().fit(whole, make_loader())
    for epoch in range(3):
        mine = module.ids[epoch * batches : (epoch + 1) * batches]
        assert mine == whole.ids[epoch * BATCHES :][:batches]


@pytest.mark.parametrize(
    ("interval", "every", "at"),
    [
        (5, 1, [5, 10, 15, 22, 27, 32]),
        (0.5, 1, [8, 16, 25, 33]),
        (1.0, 1, [17, 34]),
        (12, None, [12, 24]),
    ],
)
def test_val_check_interval_validates_between_batches_and_loses_none(
    interval: float, every: int | None, at: list[int]
) -> None:
    module = Validated()
    trainer = make_trainer(
        LoaderCallback(), val_check_interval=interval, check_val_every_n_epoch=every, max_epochs=2
    )
    trainer.fit(module, make_loader(), DataLoader(Pictures(), SAMPLES))
    assert module.at == at
    assert passes_of(module.ids, BATCHES) == [WHOLE] * 2


def test_a_reloaded_loader_goes_on_with_the_passes_of_the_one_before() -> None:
    whole = Module()
    make_trainer(max_epochs=5).fit(whole, make_loader())
    module, data, rows = Module(), Data(), Rows()
    make_trainer(
        LoaderCallback(), max_epochs=5, reload_dataloaders_every_n_epochs=2, logger=rows
    ).fit(module, datamodule=data)
    assert len(data.made) == 3
    assert module.ids == whole.ids
    assert rows.rows[-1][1]["loader/served"] == 5 * SAMPLES * REUSE


def test_a_reloaded_loader_may_be_longer() -> None:
    class Growing(Data):
        def train_dataloader(self) -> ReuseLoader:
            self.options = {"reuse": 1 + len(self.made)}
            return super().train_dataloader()

    module = Module()
    trainer = make_trainer(LoaderCallback(), reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, datamodule=Growing())
    assert len(module.ids) == 6 + 11 + 17


class Longer(L.Callback):
    """Reuses once more in every pass."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loader = trainer.train_dataloader
        assert isinstance(loader, ReuseLoader)
        loader.set_reuse(loader.reuse + 1)


@pytest.mark.parametrize(("limit", "batches"), [(1.0, 6 + 11 + 17), (0.5, 3 + 5 + 8), (7, 20)])
def test_the_trainer_learns_that_a_pass_became_longer(limit: float, batches: int) -> None:
    module, data = Module(), Data(reuse=1)
    make_trainer(Longer(), LoaderCallback(), limit_train_batches=limit).fit(module, datamodule=data)
    assert len(data.made) == 1
    assert len(module.ids) == batches


# ---- resume -------------------------------------------------------------------------------------


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


class Leaves(Module):
    """Skips the rest of its first epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 7 else None


def test_a_pass_that_was_left_is_not_gone_on_with(tmp_path: Path) -> None:
    whole = fit(None, Saver(tmp_path), module=Leaves())
    mine = fit(tmp_path / "epoch7.ckpt", module=Leaves())
    assert mine.ids == whole.ids[7:]
    assert passes_of(mine.ids, BATCHES) == [WHOLE] * 2


def test_counters_go_on_after_a_resume(tmp_path: Path) -> None:
    whole, rows = Rows(), Rows()
    fit(None, Saver(tmp_path), logger=whole)
    fit(tmp_path / "batch20.ckpt", logger=rows)
    assert [step for step, row in rows.rows if "loader/served" in row] == [*range(20, 51)]
    names = ("served", "decoded", "reused", "serves/1", "serves/3", "mean_age")
    last = [f"loader/{name}" for name in names[:-1]]
    assert [rows.rows[-1][1][n] for n in last] == [whole.rows[-1][1][n] for n in last]


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


def test_a_checkpoint_that_was_loaded_for_something_else_keeps_the_state(tmp_path: Path) -> None:
    whole = fit(None, Saver(tmp_path), module=Validated())
    callback, path = LoaderCallback(), tmp_path / "batch20.ckpt"
    trainer = make_trainer(callback)
    trainer.validate(Validated(), DataLoader(Pictures(), SAMPLES), path, weights_only=True)
    trainer.save_checkpoint(tmp_path / "again")
    again = torch.load(tmp_path / "again", weights_only=True)
    before = torch.load(path, weights_only=True)
    assert again["callbacks"]["LoaderCallback"] == before["callbacks"]["LoaderCallback"]
    assert len(whole.ids) == 51


def test_the_example_runs_as_it_is() -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "examples/plug_into_lightning.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "288 steps: 4800 decodes for 14400 samples served" in done.stdout


def test_before_training_there_is_no_state() -> None:
    assert LoaderCallback().state_dict() == {}


# ---- with phases --------------------------------------------------------------------------------


def test_beside_phases_it_logs_and_gets_a_run_over_the_end_of_a_pass(tmp_path: Path) -> None:
    phases = [Phase("pretrain", reuse=3, passes=2), Phase("finetune", passes=2)]

    def phased(ckpt: Path | None, *more: L.Callback) -> Module:
        return fit(ckpt, PhaseSwitch(phases), *more, module=Module(estimates=True), max_epochs=-1)

    whole = phased(None, Saver(tmp_path))
    assert len(whole.ids) == 2 * 17 + 2 * 6
    for step in (1, 16, 18, 33, 35, 39, 41):
        path = tmp_path / f"batch{step}.ckpt"
        assert_tail(phased(path), whole, path)


# ---- counters -----------------------------------------------------------------------------------


def test_the_loggers_are_told_the_counters_every_so_many_steps(tmp_path: Path) -> None:
    rows = Rows()
    logger = CSVLogger(tmp_path, name="", version="")
    module, loader = Module(), make_loader()
    trainer = make_trainer(LoaderCallback(), logger=[rows, logger], log_every_n_steps=5)
    trainer.fit(module, loader)
    told = [(step, row) for step, row in rows.rows if "loader/served" in row]
    assert [step for step, _ in told] == [*range(4, 50, 5)]
    step, row = told[-1]
    assert step == 49
    assert row["loader/served"] == sum(map(len, module.ids[:50]))
    assert row["loader/decoded"] + row["loader/reused"] == row["loader/served"]
    assert row["loader/decoded"] == row["loader/serves/1"] == 3 * SAMPLES
    assert (
        row["loader/serves/1"] + row["loader/serves/2"] + row["loader/serves/3"]
        == (row["loader/served"])
    )
    assert row["loader/buffer_bytes"] == loader.stats.buffer_bytes > 0
    assert row["loader/mean_age"] > 0
    assert all(0.0 <= row["loader/stall_share"] <= 1.0 for _, row in told)
    assert {name for name in row if "serves/" not in name} == {
        f"loader/{name}" for name in (*loader.stats, "stall_share") if name != "serves"
    }
    assert "loader/stall_share" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_the_share_of_stalls_is_of_the_time_spent_training(monkeypatch: pytest.MonkeyPatch) -> None:
    # A batch every 10 seconds, of which the loader says 4 were waited for; validation counts not.
    ticks = itertools.count(0, 10)
    callback, rows = LoaderCallback(clock=lambda: float(next(ticks))), Rows()
    waited = itertools.count(4, 4)
    monkeypatch.setattr(
        ReuseLoader, "stats", property(lambda _: LoaderStats(stall_seconds=next(waited)))
    )
    make_trainer(callback, logger=rows, max_epochs=1).fit(Module(), make_loader())
    shares = [row["loader/stall_share"] for _, row in rows.rows if "loader/stall_share" in row]
    assert shares == pytest.approx([0.4] * BATCHES)


# ---- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda: DataLoader(Pictures(), BATCH), "not DataLoader: ReuseLoader.from_dataloader"),
        (lambda: {"a": make_loader(), "b": make_loader()}, "there are 2: give trainer.fit"),
        (lambda: CombinedLoader([make_loader(), make_loader()]), "there are 2"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_other_train_loaders_are_refused(loader: Any, said: str) -> None:
    with pytest.raises(LoaderError, match=said):
        make_trainer(LoaderCallback()).fit(Module(), loader())


def test_a_combined_loader_of_one_is_one() -> None:
    module = Module()
    make_trainer(LoaderCallback()).fit(module, CombinedLoader(make_loader(), "max_size_cycle"))
    assert passes_of(module.ids, BATCHES) == [WHOLE] * 3
