"""The method PerFect: pre-train on reused samples, switch, fine-tune on fresh ones.

The stable names are here; `python -m perfect.train config.yaml` is the program. A name is imported
when it is first asked for: the anchor of a swarm needs no torch.
"""

from typing import TYPE_CHECKING, Any

from perfect.siblings import check_siblings

check_siblings()

if TYPE_CHECKING:
    from perfect.public_names import (
        ElasticStrategy,
        LoaderCallback,
        OffloadDDPStrategy,
        OffloadStrategy,
        Phase,
        PhaseSwitch,
        PlateauDetector,
        PlateauRule,
        ReuseLoader,
        Schedule,
    )

__all__ = [
    "ElasticStrategy",
    "LoaderCallback",
    "OffloadDDPStrategy",
    "OffloadStrategy",
    "Phase",
    "PhaseSwitch",
    "PlateauDetector",
    "PlateauRule",
    "ReuseLoader",
    "Schedule",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'perfect' has no attribute {name!r}")
    from perfect import public_names

    return getattr(public_names, name)
