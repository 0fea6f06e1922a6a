"""What a swarm cannot train exactly is refused before the first step, each with what to do."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer import elastic_refusals
from trainers.elastic.peer.elastic_refusals import check_run


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


class Transfers(Net):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


class BeforeTransfer(Net):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def manual(trainer: L.Trainer, net: Net) -> None:
    net.automatic_optimization = False


def two_optimizers(trainer: L.Trainer, net: Net) -> None:
    trainer.strategy.optimizers = [torch.optim.SGD(net.parameters(), 0.1) for _ in range(2)]


def sync_norm(trainer: L.Trainer, net: Net) -> None:
    net.add_module("norm", torch.nn.SyncBatchNorm(2))


def accumulating(trainer: L.Trainer, net: Net) -> None:
    trainer.accumulate_grad_batches = 4


def scaled(trainer: L.Trainer, net: Net) -> None:
    scaler = torch.amp.GradScaler("cpu")
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer.strategy.precision_plugin = plugin


def nothing(trainer: L.Trainer, net: Net) -> None: ...


def checked(spoil: Callable[[L.Trainer, Net], None], net: Net) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    net._trainer = trainer
    spoil(trainer, net)
    check_run(trainer, net)


def test_a_plain_run_is_taken() -> None:
    checked(nothing, Net())


@pytest.mark.parametrize(
    ("spoil", "net", "why"),
    [
        (manual, Net, "use automatic optimization"),
        (two_optimizers, Net, "there are 2 optimizers"),
        (nothing, Transfers, r"Transfers\.transfer_batch_to_device: .*on_after_batch_transfer"),
        (nothing, BeforeTransfer, r"BeforeTransfer\.on_before_batch_transfer"),
        (sync_norm, Net, "norm is a SyncBatchNorm.*use BatchNorm"),
        (accumulating, Net, "accumulate_grad_batches=4.*leave it at 1"),
        (scaled, Net, "GradScaler.*use bf16-mixed or 32-true"),
    ],
)
def test_what_would_not_be_exact_is_refused_with_what_to_do(
    spoil: Callable[[L.Trainer, Net], None], net: type[Net], why: str
) -> None:
    with pytest.raises(CannotBeElastic, match=why):
        checked(spoil, net())


def test_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_refusals, "devices_asked_for", lambda _: 2)
    with pytest.raises(CannotBeElastic, match=r"devices=2.*start a peer for each"):
        checked(nothing, Net())


def test_all_reasons_are_told_at_once() -> None:
    def both(trainer: L.Trainer, net: Net) -> None:
        manual(trainer, net)
        accumulating(trainer, net)

    with pytest.raises(CannotBeElastic, match=r"manual optimization.*; accumulate_grad_batches"):
        checked(both, Net())
