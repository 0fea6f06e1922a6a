"""Fleets on the nodes of a Ray cluster, and a job of a fleet as a trial of Ray Tune.

`ray_fleet.py` deals jobs to nodes and gathers results; `node_fleet.py` is what runs on a node.
`tune_trial.py` gives a job to Ray Tune.

May import: fleet, fleet.deciding, fleet.jobs, fleet.keeping, offloading, read_checkpoint.
"""

from trainers.fleet.ray_cluster.ray_fleet import RayFleet
from trainers.fleet.ray_cluster.tune_trial import tune_trainable

__all__ = ["RayFleet", "tune_trainable"]
