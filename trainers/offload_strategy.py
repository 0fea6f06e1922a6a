"""`L.Trainer(strategy=OffloadStrategy(budget="8GiB"))`: the module is unchanged."""

from lightning.pytorch.strategies import SingleDeviceStrategy

from trainers.planned import Planned


class OffloadStrategy(Planned, SingleDeviceStrategy):
    """On one device."""

    strategy_name = "offload"
