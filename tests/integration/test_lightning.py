"""A ReuseLoader and a stream in a plain Lightning Trainer, with and without LoaderCallback."""

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from support.lightning_runs import (
    BATCH,
    BATCHES,
    REUSE,
    SAMPLES,
    WHOLE,
    Data,
    Longer,
    Module,
    Pictures,
    Rows,
    Validated,
    make_loader,
    make_trainer,
    passes_of,
)
from torch.utils.data import DataLoader, IterableDataset

from loaders import LoaderError, ReuseLoader
from loaders.pixels.augmentation import Chain, Flip, PadCrop
from loaders.stats import LoaderStats
from loaders.streams import IterableSamples
from perfect import LoaderCallback

# ---- fit ----------------------------------------------------------------------------------------


def test_an_epoch_is_a_pass_in_another_order_each_time() -> None:
    module = Module()
    make_trainer().fit(module, make_loader())
    assert passes_of(module.ids, BATCHES) == [WHOLE] * 3
    assert len({str(module.ids[at : at + BATCHES]) for at in (0, BATCHES, 2 * BATCHES)}) == 3


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("given", ["loader", "datamodule", "sampler"])
def test_overfit_batches_trains_on_the_same_batches_in_every_epoch(given: str) -> None:
    module, theirs = Module(), Module()
    pictures: Any = Pictures()
    make_trainer(overfit_batches=2).fit(theirs, DataLoader(pictures, BATCH, shuffle=True))
    options = {"sampler": [*range(SAMPLES)][::-1]} if given == "sampler" else {"shuffle": True}
    trainer = make_trainer(LoaderCallback(), overfit_batches=2)
    if given == "datamodule":
        trainer.fit(module, datamodule=Data(reuse=1, **options))
    else:
        trainer.fit(module, make_loader(reuse=1, **options))
    assert module.ids == theirs.ids == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


@pytest.mark.parametrize(("limit", "batches"), [(5, 5), (0.5, 8), (1.0, BATCHES), (99, BATCHES)])
@pytest.mark.parametrize("callbacks", [[], [LoaderCallback]], ids=["plain", "callback"])
def test_limit_train_batches_serves_the_beginning_of_each_pass(
    limit: float, batches: int, callbacks: list[type[L.Callback]]
) -> None:
    module, loader = Module(estimates=True), make_loader()
    made = [make() for make in callbacks]
    make_trainer(*made, limit_train_batches=limit).fit(module, loader)
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


@pytest.mark.parametrize(("limit", "batches"), [(1.0, 6 + 11 + 17), (0.5, 3 + 5 + 8), (7, 20)])
def test_the_trainer_learns_that_a_pass_became_longer(limit: float, batches: int) -> None:
    module, data = Module(), Data(reuse=1)
    make_trainer(Longer(), LoaderCallback(), limit_train_batches=limit).fit(module, datamodule=data)
    assert len(data.made) == 1
    assert len(module.ids) == batches


def test_the_example_runs_as_it_is() -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "examples/plug_into_lightning.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "288 steps: 4800 decodes for 14400 samples served" in done.stdout


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
    sums = ("serves", "decoders")  # these are no numbers of their own
    assert {name for name in row if "serves/" not in name} == {
        f"loader/{name}" for name in (*loader.stats, "stall_share") if name not in sums
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


# ---- as many steps as before --------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("limit", [1.0, 0.5, 4])
def test_a_fit_may_end_after_as_many_steps_as_with_a_dataloader(
    limit: float, accumulate: int
) -> None:
    how: dict[str, Any] = {"limit_train_batches": limit, "accumulate_grad_batches": accumulate}
    plain = make_trainer(**how)
    theirs = Module(estimates=True)
    plain.fit(theirs, DataLoader(Pictures(), BATCH))
    trainer, module = make_trainer(LoaderCallback(same_steps=True), **how), Module(estimates=True)
    trainer.fit(module, make_loader(reuse=REUSE))
    assert trainer.global_step == module.estimated == plain.global_step == theirs.estimated


@pytest.mark.parametrize(("same", "warnings"), [(None, 1), (False, 0), (True, 0)])
def test_a_longer_fit_is_asked_about_once(
    same: bool | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(LoaderCallback(same_steps=same)).fit(Module(), make_loader())
    asked = [r for r in caplog.records if "LoaderCallback(same_steps=True)" in r.getMessage()]
    assert len(asked) == warnings
    make_trainer(LoaderCallback()).fit(Module(), make_loader(reuse=1))
    asked = [r for r in caplog.records if "LoaderCallback(same_steps=True)" in r.getMessage()]
    assert len(asked) == warnings, "without reuse there is nothing to ask"


# ---- a stream -----------------------------------------------------------------------------------


class Passing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        pictures = Pictures()
        return (pictures[index] for index in range(SAMPLES))


class Saver(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % 4 == 1:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit(path: Path | None, *more: L.Callback, promised: int | None = None, **how: Any) -> Module:
    module, augment = Module(), Chain([PadCrop(2), Flip()])
    stream = IterableSamples(Passing(), samples=promised)
    loader = ReuseLoader(stream, BATCH, REUSE, augment=augment, seed=3, workers=2)
    with loader:
        make_trainer(*more, **how).fit(module, loader, ckpt_path=path, weights_only=True)
    return module


def test_an_epoch_is_a_pass_though_nobody_knows_its_length() -> None:
    module = fit(None)
    assert len(module.ids) == 3 * BATCHES
    for epoch in range(3):
        batches = module.ids[epoch * BATCHES : (epoch + 1) * BATCHES]
        assert Counter(number for batch in batches for number in batch) == WHOLE


@pytest.mark.parametrize(
    "how", [{"promised": SAMPLES}, {"limit_train_batches": 5}], ids=["promised", "limited"]
)
def test_a_fit_goes_on_from_a_checkpoint_with_the_same_batches(
    how: dict[str, Any], tmp_path: Path
) -> None:
    whole = fit(None, Saver(tmp_path), LoaderCallback(), **how)
    for path in tmp_path.iterdir():
        mine, step = fit(path, LoaderCallback(), **how), int(path.stem)
        assert mine.ids == whole.ids[step:]
        ours, theirs = (torch.cat([*each, torch.empty(0, 3, 6, 6)])
                        for each in (mine.pixels, whole.pixels[step:]))  # fmt: skip
        assert torch.equal(ours, theirs)


def test_checkpoints_that_would_miss_a_batch_are_refused_with_what_to_do() -> None:
    with pytest.raises(LoaderError, match="samples=, or Trainer limit_train_batches="):
        fit(None, LoaderCallback())
