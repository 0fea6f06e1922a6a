"""OffloadStrategy on a GPU that is lost, and the times of steps on one."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from support.accelerators import only_on_gpu
from support.fake_gpu import losable_device, lose_device, only_on_a_fake_gpu

from offload import DeviceLost
from trainers import OffloadStrategy
from trainers.steps.meter import FIRST

pytestmark = [only_on_gpu, *(pytest.mark.filterwarnings(line) for line in ol.QUIET)]


# ---- a device that is lost ---------------------------------------------------------------------


class Loses(L.Callback):
    """The device falls off its bus before a step; then callbacks want to save."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.refused: list[BaseException] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint(self._folder / "good.ckpt")
        if batch_idx == 4:
            lose_device()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        with pytest.raises(DeviceLost) as refused:
            trainer.save_checkpoint(self._folder / "bad.ckpt")
        self.refused.append(refused.value)


@only_on_a_fake_gpu("the test loses the device")
@pytest.mark.parametrize("budget", [None, "60%"])
def test_a_lost_device_ends_the_run_and_nothing_is_saved_of_it(
    budget: str | None, tmp_path: Path
) -> None:
    loses = Loses(tmp_path)
    with (
        losable_device(),
        pytest.raises(DeviceLost, match="is lost: a kernel used an address") as ended,
    ):
        ol.train(OffloadStrategy(budget), callbacks=[loses])
    assert loses.refused and "checkpoint" in str(ended.value)
    assert not (tmp_path / "bad.ckpt").exists()
    good = torch.load(tmp_path / "good.ckpt", weights_only=False, map_location="cpu")
    plainly = ol.train("auto", max_steps=good["global_step"])
    assert ol._unequal("", good["state_dict"], plainly.module.state_dict()) == []


def test_runs_that_nobody_looks_at_count_as_the_latest_that_was() -> None:
    strategy = OffloadStrategy()
    ol.train(strategy, max_epochs=4, validate=False)
    most = max(strategy.plans, key=lambda plan: plan.spent.runs)
    assert most.spent.runs > FIRST
    assert 0 < most.spent.compute_seconds <= most.spent.seconds
