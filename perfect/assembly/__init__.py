"""Builds the objects of a run from its configuration. No other folder branches on a configuration.

    RunConfig -> data: Data (train, hold-out, test) -> phases: PhaseSwitch -> run: module, Trainer

A problem that only the data can show (a batch larger than the data set) is a BuildError with the
key that it comes from, so that train.py reports it with the line of the file.

May import: callbacks, config, errors, loaders, loaders.adopting, loaders.backends, loaders.errors,
    loaders.order, loaders.pipeline, loaders.pixels, loaders.sharing, loaders.sources, method,
    models, offload, offload.running.drivers, offload.sizes, runs, text, trainers,
    trainers.atomic_checkpoint, trainers.elastic, trainers.elastic.peer, trainers.elastic.wire,
    trainers.fleet.jobs, trainers.offloading.
"""

from perfect.assembly.berth import (
    Berth,
    berth_alone,
    berth_in_fleet,
    berth_in_replay,
    berth_in_swarm,
    check_node,
)
from perfect.assembly.data import Data, build_data, split_holdout
from perfect.assembly.own_class import named_classes
from perfect.assembly.phase_plan import build_phase_switch, build_phases
from perfect.assembly.run import build_module, build_trainer
from perfect.assembly.strategy import to_blame, watched

__all__ = [
    "Berth",
    "Data",
    "berth_alone",
    "berth_in_fleet",
    "berth_in_replay",
    "berth_in_swarm",
    "build_data",
    "build_module",
    "build_phase_switch",
    "build_phases",
    "build_trainer",
    "check_node",
    "named_classes",
    "split_holdout",
    "to_blame",
    "watched",
]
