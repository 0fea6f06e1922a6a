"""`L.Trainer(strategy=OffloadStrategy(budget="8GiB"))` trains an unchanged module on one device."""

from typing import NoReturn

from offload import OffloadError
from trainers.offloading.live_fit import LiveFit
from trainers.one_device import OneDeviceStrategy


class OffloadStrategy(LiveFit, OneDeviceStrategy):
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
        asked = self._request
        return (
            f"OffloadStrategy(budget={asked.budget!r}, host_budget={asked.host_budget!r},"
            f" recompute={asked.recompute!r}, optimizer={asked.optimizer!r},"
            f" engine={asked.engine!r})"
        )

    def _refuse_devices(self, count: int) -> NoReturn:
        raise OffloadError(
            f"OffloadStrategy runs on one device, and the trainer has {count}: give"
            " Trainer(devices=1), or OffloadDDPStrategy"
        )
