"""`L.Trainer(strategy=OffloadStrategy(budget="8GiB"))`: the module is unchanged."""

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from offload import OffloadError
from trainers.planned import Planned


class OffloadStrategy(Planned, SingleDeviceStrategy):
    """On one device: the one that `Trainer(accelerator=, devices=)` names."""

    strategy_name = "offload"

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        """None yet: so Lightning tells which, as it does not tell plain one-device strategies."""
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
