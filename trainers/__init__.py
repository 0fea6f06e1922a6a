"""Who runs steps, on what: Lightning strategies over `offload` and `loaders`.

A strategy is imported when it is first asked for: parts of this package need no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.elastic.peer.elastic_strategy import ElasticStrategy
    from trainers.offloading.ddp_strategy import OffloadDDPStrategy
    from trainers.offloading.strategy import OffloadStrategy

__all__ = ["ElasticStrategy", "OffloadDDPStrategy", "OffloadStrategy"]


def __getattr__(name: str) -> Any:
    if name == "ElasticStrategy":
        from trainers.elastic.peer.elastic_strategy import ElasticStrategy

        return ElasticStrategy
    if name == "OffloadDDPStrategy":
        from trainers.offloading.ddp_strategy import OffloadDDPStrategy

        return OffloadDDPStrategy
    if name == "OffloadStrategy":
        from trainers.offloading.strategy import OffloadStrategy

        return OffloadStrategy
    raise AttributeError(f"module 'trainers' has no attribute {name!r}")
