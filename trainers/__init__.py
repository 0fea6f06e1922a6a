"""Who runs steps, on what: Lightning strategies over `offload` and `loaders`."""

from trainers.ddp_strategy import OffloadDDPStrategy
from trainers.offload_strategy import OffloadStrategy

__all__ = ["OffloadDDPStrategy", "OffloadStrategy"]
