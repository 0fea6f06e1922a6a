"""Many jobs on few devices: the arena of a device is lent to one job at a time, for whole steps.

May import: fleet.deciding, fleet.hosting, fleet.inputs, fleet.jobs, fleet.keeping, loaders,
    offload.memory, offload.sizes, random_state, torch_seams.
"""

from trainers.fleet.deciding.events import FleetError, JobMemory
from trainers.fleet.deciding.halving import Halving
from trainers.fleet.fleet import Fleet
from trainers.fleet.keeping.fleet_result import FleetResult, JobResult

__all__ = ["Fleet", "FleetError", "FleetResult", "Halving", "JobMemory", "JobResult"]
