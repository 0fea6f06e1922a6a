"""The program of a job whose parameters a sampler has chosen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L

from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.jobs.job_program import JobProgram
from trainers.fleet.jobs.lightning_job import LightningJob
from trainers.fleet.jobs.seat import Seat

Make = Callable[[Mapping[str, Any]], Mapping[str, Any] | JobProgram]
"""From parameters to the arguments of `Fleet.add` (module=, train=, ...), or to a program."""
KNOWN = ("module", "train", "val", "trainer", "offload", "seed", "reserve")


@dataclass(frozen=True, slots=True, eq=False)
class SearchedJob:
    """Calls `make` in the job's own turn, so that a job whose making fails is a job that failed,
    and what it draws is drawn with the job's own seed."""

    make: Make
    params: Mapping[str, Any]
    seed: int

    def __call__(self, seat: Seat) -> None:
        L.seed_everything(self.seed, verbose=False)
        made = self.make(dict(self.params))
        program = self._lightning_job(made, seat) if isinstance(made, Mapping) else made
        if not callable(program):
            raise FleetError(
                f"`make` returned a {type(made).__name__} for {dict(self.params)}: return a dict"
                f" with {', '.join(KNOWN)} as for Fleet.add, or a program"
            )
        program(seat)

    def _lightning_job(self, made: Mapping[str, Any], seat: Seat) -> LightningJob:
        unknown = sorted(made.keys() - {*KNOWN})
        missing = sorted({"module", "train"} - made.keys())
        if unknown or missing:
            raise FleetError(
                f"`make` returned a dict with {', '.join(map(str, made)) or 'nothing'}:"
                f" module and train are needed, and {', '.join(KNOWN)} are known"
            )
        return LightningJob.of(
            name=seat.name,
            module=made["module"],
            train=made["train"],
            val=made.get("val"),
            trainer=made.get("trainer") or {},
            offload=made.get("offload"),
            seed=made.get("seed", self.seed),
            reserve=made.get("reserve"),
            device=seat.device,
        )
