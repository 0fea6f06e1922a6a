"""Many jobs on few devices: the arena of a device is lent to one job at a time, for whole steps.

`deciding/` says what happens next, from events alone. The other rooms do it.

May import: fleet.deciding.
"""

from trainers.fleet.deciding.events import JobMemory
from trainers.fleet.deciding.fleet_error import FleetError

__all__ = ["FleetError", "JobMemory"]
