"""A strategy of Lightning's that trains in one process on the devices of the trainer."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy


class OneDeviceStrategy(SingleDeviceStrategy):
    """It takes the device that the trainer has, unless the user gives `device=`."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._has_device = "device" in more

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        """This is empty, so that Lightning sets it: it does not tell a plain single-device strategy
        which device the trainer has."""
        return ()

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) > 1:
            self._take_several(devices)
        if devices and not self._has_device:
            self._root_device = torch.device(devices[0])

    def _take_several(self, devices: Sequence[torch.device]) -> None:
        """Take all devices of the trainer, or raise an error that says what to do."""
        raise NotImplementedError
