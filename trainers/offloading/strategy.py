"""`L.Trainer(strategy=OffloadStrategy(budget="8GiB"))` trains an unchanged module."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from offload import OffloadError
from trainers.offloading.planned_strategy import PlannedStrategy
from trainers.one_device import OneDeviceStrategy


class OffloadStrategy(PlannedStrategy, OneDeviceStrategy):
    """Plans and offloads the steps, which one process runs on the trainer's devices.

        strategy = OffloadStrategy(budget="8GiB")
        trainer = L.Trainer(strategy=strategy, accelerator="auto", devices=1, max_epochs=3)
        trainer.fit(module, train_loader)

    The losses are those of plain Lightning on one device, bit for bit. What does not fit waits in
    host memory. `Trainer(devices=4)`, or `devices=4` here, spreads each step over four devices.

    memory     budget: the bytes of each device that a step may take ("8GiB"), or the share of
               what it needs ("80%"); None: no limit. host_budget: the most that waits on the host
    means      recompute: "auto" may compute activations again, "never" keeps them; optimizer:
               where updates run, "auto", "device" or "host"; engine: who runs the plan
    checks     verify: prove each plan
    restarts   plan_cache: a folder for plans, so that the next start does not search again
    """

    strategy_name = "offload"

    def __repr__(self) -> str:
        request = self._run.request
        return (
            f"OffloadStrategy(budget={request.budget!r}, host_budget={request.host_budget!r},"
            f" recompute={request.recompute!r}, optimizer={request.optimizer!r},"
            f" engine={request.engine!r}, devices={request.devices})"
        )

    def _take_several(self, devices: Sequence[torch.device]) -> None:
        request, count = self._run.request, len(devices)
        if request.devices not in (1, count):
            raise OffloadError(
                f"OffloadStrategy(devices={request.devices}) and Trainer(devices={count}) differ:"
                " name the devices once"
            )
        numbers = [device.index for device in devices]
        if devices[0].type == "cuda" and numbers != [*range(numbers[0], numbers[0] + count)]:
            raise OffloadError(
                f"OffloadStrategy runs on devices that follow each other, and the trainer's are"
                f" {numbers}: hide the others with CUDA_VISIBLE_DEVICES"
            )
        self._run.request = replace(request, devices=count)

    def setup_environment(self) -> None:
        launcher = TorchElasticEnvironment()
        if launcher.detect() and launcher.world_size() > 1:
            raise OffloadError(
                "OffloadStrategy trains in one process, and torchrun has started"
                f" {launcher.world_size()}, each of which would train the same run by itself:"
                " start one without torchrun, or train on several machines with ElasticStrategy"
            )
        super().setup_environment()
