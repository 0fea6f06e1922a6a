"""`LiveOffloadStrategy(budget="8GiB")` trains an unchanged module on one device.

It is on the way to be `OffloadStrategy` (docs/decisions/0041)."""

from typing import NoReturn

from offload import OffloadError
from trainers.offloading.live_fit import LiveFit
from trainers.one_device import OneDeviceStrategy


class LiveOffloadStrategy(LiveFit, OneDeviceStrategy):
    """Plans and offloads the steps of one device, whose Python runs in every step."""

    strategy_name = "offload_live"

    def _refuse_devices(self, count: int) -> NoReturn:
        raise OffloadError(
            f"OffloadStrategy runs on one device, and the trainer has {count}: give"
            " Trainer(devices=1), or OffloadDDPStrategy"
        )
