"""`L.Trainer(strategy=OffloadStrategy(budget="8GiB"))` trains an unchanged module on one device."""

from typing import NoReturn

from offload import OffloadError
from trainers.offloading.manual_fit import ManualFit
from trainers.one_device import OneDeviceStrategy


class OffloadStrategy(ManualFit, OneDeviceStrategy):
    """Plans and offloads the steps of one device, which `Trainer(accelerator=, devices=)` names."""

    strategy_name = "offload"

    def _refuse_devices(self, count: int) -> NoReturn:
        raise OffloadError(
            f"OffloadStrategy runs on one device, and the trainer has {count}: give"
            " Trainer(devices=1), or OffloadDDPStrategy"
        )
