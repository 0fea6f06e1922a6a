"""`strategy.move_to(device=)`: a Lightning run goes from a GPU to the host, and to another GPU."""

from concurrent.futures import Future
from typing import Any

import lightning as L
import pytest
import torch
from integration.test_budget_moves import Trained, assert_same
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jobs.fleet_jobs import QUIET
from trainers import OffloadStrategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
STEPS = 12


class Moving(L.Callback):
    """Moves before some steps, and looks at the weights just before and after each move."""

    def __init__(self, devices: dict[int, str]) -> None:
        self.asked: list[Future[Any]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.batches: list[str] = []
        self._devices = devices

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, OffloadStrategy)
        self.batches.append(batch[0].device.type)
        self.weights.append({k: v.cpu().clone() for k, v in pl_module.state_dict().items()})
        if batch_idx in self._devices:
            self.asked.append(trainer.strategy.move_to(device=self._devices[batch_idx]))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.weights.append({k: v.cpu().clone() for k, v in pl_module.state_dict().items()})


def fit(devices: dict[int, str], **more: Any) -> tuple[dict[str, torch.Tensor], Moving, L.Trainer]:
    torch.manual_seed(1)
    module, moving = Trained(), Moving(devices)
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(8 * STEPS, 16, generator=numbers)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)
    trainer = L.Trainer(
        max_epochs=1, accelerator="gpu", devices=1, logger=False, callbacks=[moving],
        strategy=OffloadStrategy("100%"), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **more,
    )  # fmt: skip
    trainer.fit(module, data, data)
    return module.state_dict(), moving, trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_goes_to_the_host_and_back(precision: Any) -> None:
    with pytest.warns(UserWarning, match="later bits are those of the new device"):
        _, moving, trainer = fit({3: "cpu", 7: "cuda:0"}, val_check_interval=4, precision=precision)
    assert all(one.result(0).nbytes > 0 for one in moving.asked)
    assert moving.batches == ["cuda"] * 4 + ["cpu"] * 4 + ["cuda"] * 4
    assert trainer.global_step == STEPS
    for after, begin in zip(moving.weights[1::2], moving.weights[2::2], strict=False):
        assert_same(after, begin)  # no move changes a weight


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_run_goes_to_another_gpu_with_the_bits_of_one_that_stays() -> None:
    stays, _, _ = fit({}, deterministic=True)
    moves, moving, _ = fit({3: "cuda:1", 7: "cuda:0"}, deterministic=True)
    assert all(one.result(0).nbytes > 0 for one in moving.asked)
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert_same(stays, moves)
