"""The method PerFect: pre-train on reused samples, switch, fine-tune on fresh ones.

The stable names are here; `python -m perfect.train config.yaml` is the program.
"""

from loaders import ReuseLoader
from perfect.callback import PhaseSwitch
from perfect.phases import Phase, PlateauDetector, PlateauRule
from perfect.schedule import Schedule

__all__ = ["Phase", "PhaseSwitch", "PlateauDetector", "PlateauRule", "ReuseLoader", "Schedule"]
