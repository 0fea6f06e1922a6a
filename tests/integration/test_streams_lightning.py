"""A stream in a plain Trainer: its passes are epochs, and a fit goes on from a checkpoint."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.lightning_runs import (
    BATCH,
    BATCHES,
    REUSE,
    SAMPLES,
    WHOLE,
    Module,
    Pictures,
    make_trainer,
)
from torch.utils.data import IterableDataset

from loaders import LoaderError, ReuseLoader
from loaders.pixels.augmentation import Chain, Flip, PadCrop
from loaders.streams import IterableSamples
from perfect import LoaderCallback


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
