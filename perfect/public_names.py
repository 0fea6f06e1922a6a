"""The stable names of perfect, each imported from where it is."""

from loaders import ReuseLoader
from perfect.callbacks.loader_callback import LoaderCallback
from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.method.phases import Phase, PlateauDetector, PlateauRule
from perfect.method.schedule import Schedule
from trainers import ElasticStrategy, OffloadStrategy, SaveStep

__all__ = [
    "ElasticStrategy",
    "LoaderCallback",
    "OffloadStrategy",
    "Phase",
    "PhaseSwitch",
    "PlateauDetector",
    "PlateauRule",
    "ReuseLoader",
    "SaveStep",
    "Schedule",
]
