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
from support.products import every_value
from torch import nn

from offload import OffloadError
from trainers import OffloadDDPStrategy, OffloadStrategy

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


class Saves(L.Callback):
    """In the middle of the fit, where some tensors are on the device and some only seem to be."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.devices: set[str] = set()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.file)
            self.devices = {p.device.type for p in pl_module.parameters()}


def test_checkpoints_have_plain_lightnings_keys_and_values_and_go_on_with_any_budget(
    tmp_path: Path,
) -> None:
    ours, theirs = Saves(tmp_path / "ours.ckpt"), Saves(tmp_path / "theirs.ckpt")
    strategy = offloading("60%")
    train(strategy, callbacks=[ours])
    train(callbacks=[theirs])
    one, other = (
        torch.load(saves.file, map_location="cpu", weights_only=False) for saves in (ours, theirs)
    )
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert ol._unequal(part, other[part], one[part]) == []
    assert other.keys() == one.keys()
    assert ours.devices == {"cuda"}
    results = [
        train(strategy, ckpt_path=ours.file, seed=8)
        for strategy in ("auto", offloading("60%"), offloading())
    ]
    assert ol.differences(results[0], results[1]) == ol.differences(results[0], results[2]) == []


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
    with pytest.raises(OffloadError, match="OffloadDDPStrategy runs on the CPU so far"):
        train(OffloadDDPStrategy())


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
