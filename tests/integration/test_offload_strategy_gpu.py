"""OffloadStrategy on a GPU, where the CPU's suites (support/accelerators.py) say nothing.

Skipped without a CUDA device; docs/gpu-status.md says when it last ran on one. The model's kernels
sum in one order, so that two plain runs are equal too: the first test asks that.
"""

import functools
import gc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from products import every_value
from support import offload_lightning as ol
from torch import nn

from offload import BudgetTooSmall, OffloadError
from trainers import OffloadDDPStrategy, OffloadStrategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
]
replayed = ol.replayed
EPOCHS = 6
"""The first runs of a plan are looked at, and those of the remade one: no graph is captured yet.
Of micro-batches that run together there are two runs an epoch."""
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
    with pytest.raises(BudgetTooSmall) as refused:
        train(offloading(64), **RUNS[name])
    return refused.value.needed


@pytest.mark.parametrize("name", RUNS)
def test_two_plain_runs_are_equal_on_this_device(name: str) -> None:
    assert ol.differences(plain(name), train(**RUNS[name])) == []


@pytest.mark.parametrize("name, budget", every_value(RUNS, ["smallest", None, "60%", "100%"]))
def test_replayed_steps_are_plain_lightnings_to_the_last_bit(
    name: str, budget: str | None, replayed: list[Any]
) -> None:
    limit: Any = smallest(name) if budget == "smallest" else budget
    # Nothing is checked on the fly: every step is the plan's.
    strategy = offloading(limit, engine="cudagraph")
    result = train(strategy, **RUNS[name], max_epochs=EPOCHS)
    assert ol.differences(plain(name, EPOCHS), result) == []
    assert strategy.spent.runs and strategy.target.device.type == "cuda"
    assert replayed
    if budget == "smallest":
        assert strategy.plan.device_bytes <= limit


def test_the_first_steps_are_compared_and_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*OffloadStrategy.*")
        result = train(offloading("60%"))
    assert ol.differences(plain("plain"), result) == []


def test_micro_batches_of_streamed_weights_are_compared_too() -> None:
    """A user's settings: plain Lightning leaves gradients on the device from one to the next."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*OffloadStrategy.*")
        result = train(offloading("60%"), **RUNS["accumulated"])
    assert ol.differences(plain("accumulated"), result) == []


class Saves(L.Callback):
    """In the middle of the fit, where some tensors are on the device and some are not."""

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
    assert ours.devices == {"cuda", "cpu"}
    results = [
        train(strategy, ckpt_path=ours.file, seed=8)
        for strategy in ("auto", offloading("60%"), offloading())
    ]
    assert ol.differences(results[0], results[1]) == ol.differences(results[0], results[2]) == []


class Looks(ol.Module):
    """Validation that cannot be captured."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        assert loss.item() < 100 and loss.device == self.device
        self.log("val_loss", loss)


@pytest.mark.parametrize("budget, where, bits", [(None, "device", True), ("60%", "host", False)])
def test_validation_that_cannot_be_planned_runs_in_one_place(
    budget: str | None, where: str, bits: bool
) -> None:
    with pytest.warns(UserWarning, match=f"validates on the {where}, without offloading"):
        ours = train(offloading(budget), make=Looks)
    theirs = train(make=Looks)
    if not bits:  # the CPU's kernels: only what was validated may differ, and by little
        name = "callback val_loss"
        torch.testing.assert_close(ours.metrics.pop(name), theirs.metrics.pop(name))
        for one in (ours, theirs):
            one.metrics.pop("logged val_loss", None)
    assert ol.differences(theirs, ours) == []


class Manual(ol.Module):
    def __init__(self) -> None:
        super().__init__("sgd")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Backward(ol.Module):
    def __init__(self) -> None:
        super().__init__("sgd")

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def test_a_run_without_a_plan_is_plain_lightnings_on_the_device() -> None:
    with pytest.warns(UserWarning, match="trains eagerly"):
        ours = train(OffloadStrategy(), make=Backward)
    assert ol.differences(train(make=Backward), ours) == []
    with pytest.raises(OffloadError, match="cannot be planned"):
        train(OffloadStrategy(budget="60%"), make=Backward)


@pytest.mark.parametrize("budget", [None, "60%"])
def test_a_step_that_optimizes_by_hand_is_replayed(budget: str | None) -> None:
    ours = train(OffloadStrategy(budget=budget, engine="cudagraph"), make=Manual)
    assert ol.differences(train(make=Manual), ours) == []


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
        with pytest.raises(OffloadError, match=r"free|left|had"):
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
