"""Fleets on the nodes of a Ray cluster, and a job of a fleet as a trial of Ray Tune.

May import: fleet, fleet.deciding, fleet.jobs, fleet.keeping, offload.sizes, offloading,
    read_checkpoint.
"""

from trainers.fleet.ray_cluster.ray_fleet import RayFleet
from trainers.fleet.ray_cluster.tune_trial import tune_trainable

__all__ = ["RayFleet", "tune_trainable"]
