"""Configuration -> objects. The only place that branches on what a configuration says.

    RunConfig -> data: Data (train, hold-out, test) -> phases: PhaseSwitch -> run: module, Trainer

Problems that only the data can show (a batch larger than the set, say) are BuildErrors naming the
key they come from, so that train.py reports them with the file's line.
"""

from perfect.assembly.data import Data, build_augmentation, build_data, split_holdout
from perfect.assembly.offload import to_blame, watched
from perfect.assembly.phases import build_phase_switch, build_phases
from perfect.assembly.run import build_module, build_trainer

__all__ = [
    "Data",
    "build_augmentation",
    "build_data",
    "build_module",
    "build_phase_switch",
    "build_phases",
    "build_trainer",
    "split_holdout",
    "to_blame",
    "watched",
]
