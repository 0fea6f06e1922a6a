"""`L.Trainer(strategy=OffloadStrategy(budget="8GiB"))` trains an unchanged module on one device."""

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from offload import OffloadError
from trainers.offloading.planned_fit import PlannedFit


class OffloadStrategy(PlannedFit, SingleDeviceStrategy):
    """Plans and offloads the steps of one device, which `Trainer(accelerator=, devices=)` names."""

    strategy_name = "offload"

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        """This is empty, so that Lightning sets it: it does not tell a plain single-device strategy
        which device the trainer has."""
        return ()

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) > 1:
            raise OffloadError(
                f"OffloadStrategy runs on one device, and the trainer has {len(devices)}: give"
                " Trainer(devices=1), or OffloadDDPStrategy"
            )
        if devices and not self._has_device:
            self._root_device = torch.device(devices[0])
