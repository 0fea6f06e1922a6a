"""What a swarm cannot train exactly is refused before the first step, each with what to do."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision

from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.elastic_fit import ElasticFit, check_run


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
    net.trainer = trainer
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


class Gpus(CUDAAccelerator):
    """Says that there are GPUs. None is touched before a fit begins."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1


def strategy_with(devices: int | str, **more: Any) -> ElasticFit:
    strategy = ElasticFit(None, 8, "fast", **more)
    trainer = L.Trainer(
        accelerator=Gpus(), devices=devices, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    assert trainer.strategy is strategy
    return strategy


def test_a_peer_trains_on_the_one_device_that_the_trainer_has() -> None:
    assert strategy_with("auto").root_device == torch.device("cuda", 0)
    assert strategy_with(1).root_device == torch.device("cuda", 0)


def test_the_device_that_the_user_names_is_kept() -> None:
    assert strategy_with(1, device=torch.device("cuda", 3)).root_device == torch.device("cuda", 3)


def test_several_devices_are_refused() -> None:
    with pytest.raises(CannotBeElastic, match=r"devices=2.*devices= to the strategy"):
        strategy_with(2)


def test_all_reasons_are_told_at_once() -> None:
    def both(trainer: L.Trainer, net: Net) -> None:
        manual(trainer, net)
        accumulating(trainer, net)

    with pytest.raises(CannotBeElastic, match=r"manual optimization.*; accumulate_grad_batches"):
        checked(both, Net())
