"""`L.Trainer(strategy=OffloadStrategy(budget="8GiB"))` trains an unchanged module on one device."""

from typing import NoReturn

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from offload import OffloadError
from trainers.offloading.planned_strategy import PlannedStrategy
from trainers.one_device import OneDeviceStrategy


class OffloadStrategy(PlannedStrategy, OneDeviceStrategy):
    """Plans and offloads the steps of one device, which `Trainer(accelerator=, devices=)` names.

        strategy = OffloadStrategy(budget="8GiB")
        trainer = L.Trainer(strategy=strategy, accelerator="auto", devices=1, max_epochs=3)
        trainer.fit(module, train_loader)

    The losses are those of plain Lightning, bit for bit. What does not fit waits in host memory.

    memory     budget: the device's bytes that a step may take ("8GiB"), or the share of what it
               needs ("80%"); None: no limit. host_budget: the most that waits on the host
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
            f" engine={request.engine!r})"
        )

    def setup_environment(self) -> None:
        launcher = TorchElasticEnvironment()
        if launcher.detect() and launcher.world_size() > 1:
            raise OffloadError(
                "OffloadStrategy trains in one process, and torchrun has started"
                f" {launcher.world_size()}, each of which would train the same run by itself:"
                " start one without torchrun, or train on several machines with ElasticStrategy"
            )
        super().setup_environment()

    def _refuse_devices(self, count: int) -> NoReturn:
        raise OffloadError(
            f"OffloadStrategy runs on one device, and the trainer has {count}: give"
            " Trainer(devices=1), or train on several machines with ElasticStrategy"
        )
