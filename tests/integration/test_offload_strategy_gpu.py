"""OffloadStrategy on a GPU, where the CPU's suites (support/accelerators.py) say nothing.

Skipped without a CUDA device; docs/gpu-status.md says when it last ran on one. The model's kernels
sum in one order, so that two plain runs are equal too: the first test asks that.
"""

import functools
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from support.fake_gpu import losable_device, lose_device, only_on_a_fake_gpu
from support.products import every_value
from torch import nn

from offload import DeviceLost, OffloadError
from trainers import OffloadStrategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
]
replayed = ol.replayed
EPOCHS = 6
"""In its first runs a plan is looked at, and no graph is captured yet."""
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


def train(strategy: Any = "auto", **options: Any) -> ol.Result:
    """On the GPU; what came of it on the host."""
    result = ol.train(strategy, accelerator="gpu", devices=1, **options)
    return replace(result, metrics={name: m.cpu() for name, m in result.metrics.items()})


def offloading(budget: Any = None, **options: Any) -> OffloadStrategy:
    """Updates where plain Lightning has them: the host's kernels have other last bits."""
    return OffloadStrategy(budget=budget, optimizer="device", **options)


@functools.cache
def plain(name: str, epochs: int = 2) -> ol.Result:
    return train(**RUNS[name], max_epochs=epochs)


@functools.cache
def smallest(name: str) -> int:
    return ol.smallest(offloading, **RUNS[name], accelerator="gpu", devices=1)


@pytest.mark.parametrize("name", RUNS)
def test_two_plain_runs_are_equal_on_this_device(name: str) -> None:
    assert ol.differences(plain(name), train(**RUNS[name])) == []


@pytest.mark.parametrize("name, budget", every_value(RUNS, ["smallest", None, "60%", "100%"]))
def test_replayed_steps_are_plain_lightnings_to_the_last_bit(
    name: str, budget: str | None, replayed: list[Any]
) -> None:
    limit: Any = smallest(name) if budget == "smallest" else budget
    strategy = offloading(limit, engine="cudagraph")
    result = train(strategy, **RUNS[name], max_epochs=EPOCHS)
    assert ol.differences(plain(name, EPOCHS), result) == []
    assert strategy.spent.runs and strategy.target.device.type == "cuda"
    assert replayed
    if budget == "smallest":
        assert strategy.plan.device_bytes <= limit


class Looks(ol.Module):
    """It reads values where it validates, and its backward pass and its optimizer, which counts on
    the host, are its own."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        assert loss.item() < 100 and loss.device == self.device
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.RAdam(self.parameters(), 0.01, betas=(0.9, 0.99))


@pytest.mark.parametrize("budget", [None, "60%"])
def test_values_and_counters_of_the_host_are_plain_lightnings(budget: str | None) -> None:
    ours = train(offloading(budget, engine="cudagraph"), make=Looks, max_epochs=EPOCHS)
    assert ol.differences(train(make=Looks, max_epochs=EPOCHS), ours) == []


def test_afterwards_all_tensors_are_on_the_host_as_after_plain_lightning() -> None:
    result = train(OffloadStrategy(budget="60%"))
    assert {t.device.type for t in result.module.state_dict().values()} == {"cpu"}


def test_engines_and_devices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OffloadError, match="engine='threads' runs on the CPU"):
        train(OffloadStrategy(engine="threads"))
    with pytest.raises(OffloadError, match="engine='cuda' runs on a GPU"):
        ol.train(OffloadStrategy(engine="cuda"), accelerator="cpu")


def test_more_memory_than_the_device_has_is_refused_before_the_run() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # what other tests left to PyTorch would be enough
    taken = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.995), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises((OffloadError, torch.OutOfMemoryError), match=r"free|left|had"):
            train(OffloadStrategy(budget="64GiB"), make=functools.partial(Wide, 1 << 14))
    finally:
        del taken
        torch.cuda.empty_cache()


class Wide(ol.Module):
    """Takes gigabytes."""

    def __init__(self, width: int) -> None:
        super().__init__("sgd")
        self.enter = nn.Linear(12, width)
        self.blocks = nn.Sequential(nn.Linear(width, width), nn.Linear(width, ol.WIDTH))


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
        train(offloading(budget), callbacks=[loses])
    assert loses.refused and "checkpoint" in str(ended.value)
    assert not (tmp_path / "bad.ckpt").exists()
    good = torch.load(tmp_path / "good.ckpt", weights_only=False, map_location="cpu")
    plainly = train("auto", max_steps=good["global_step"])
    assert ol._unequal("", good["state_dict"], plainly.module.state_dict()) == []
