"""A point of a grid as a job of a fleet: the run that `perfect-train` makes of its YAML alone."""

from dataclasses import dataclass

from perfect.assembly import berth_in_fleet
from perfect.commands.training import train_run
from perfect.config.schema import RunConfig, dump_config
from perfect.errors import BuildError, Interrupted, RunFailed
from perfect.grids.job_output import OUTPUT, job_output
from perfect.runs.folder import RunFolder
from trainers.fleet.hosting.device_process import PROGRAM
from trainers.fleet.jobs.job_left import JobLeft
from trainers.fleet.jobs.seat import Seat
from trainers.fleet.jobs.turns import STOPPED

OF_THE_FLEET = (OUTPUT, PROGRAM, STOPPED)
"""Files that the fleet and this program put into a job's folder, beside those of the run."""


@dataclass(frozen=True, slots=True)
class GridJob:
    """The program of one point. It can be pickled."""

    config: RunConfig

    def __call__(self, seat: Seat) -> None:
        folder = RunFolder(seat.folder, also=OF_THE_FLEET)
        with job_output(seat.folder) as console:
            if folder.open(dump_config(self.config)) == "completed":
                return  # a kill came between the end of the run and the fleet's note of it
            try:
                train_run(self.config, folder, berth_in_fleet(seat, console))
            except Interrupted as error:
                raise JobLeft(folder.checkpoint_step() or 0) from error
            except BuildError as error:
                found = [error, *error.others]
                raise RunFailed("; ".join(f"{e.key}: {e.reason}" for e in found)) from error
