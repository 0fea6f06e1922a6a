"""`L.Trainer(strategy=OffloadStrategy(budget="8GiB"))`: the module is unchanged."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from offload import OffloadError
from trainers.planned import Planned


class OffloadStrategy(Planned, SingleDeviceStrategy):
    """On one device: the one that `Trainer(accelerator=, devices=)` names."""

    strategy_name = "offload"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._given = "device" in more

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
        if devices and not self._given:
            self._root_device = torch.device(devices[0])
