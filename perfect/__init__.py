"""The method PerFect: pre-train on reused samples, switch, fine-tune on fresh ones.

The stable names are here; `python -m perfect.train config.yaml` is the program.
"""

from perfect.siblings import check_siblings

check_siblings()

from loaders import ReuseLoader  # noqa: E402
from perfect.callbacks.loader_callback import LoaderCallback  # noqa: E402
from perfect.callbacks.phase_switch import PhaseSwitch  # noqa: E402
from perfect.method.phases import Phase, PlateauDetector, PlateauRule  # noqa: E402
from perfect.method.schedule import Schedule  # noqa: E402
from trainers import ElasticStrategy, OffloadDDPStrategy, OffloadStrategy  # noqa: E402

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
