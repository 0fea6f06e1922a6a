"""Who runs steps, on what: Lightning strategies over `offload` and `loaders`."""

from trainers.offload_strategy import OffloadStrategy

__all__ = ["OffloadStrategy"]
