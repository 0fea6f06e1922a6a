"""The stage of one device, and what its jobs take of the memory.

All jobs of a device share its stage: one arena, one engine. The stage is made when the first job
has a plan.
"""

import time
from collections.abc import Hashable

import torch

from offload import Plan, Runner
from offload.errors import DeviceLost
from offload.graph.costs import Costs
from offload.memory.host_needs import needs
from offload.planning.host_tails import tail_seconds
from offload.running.stage import Stage
from trainers.fleet.deciding.events import JobMemory
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.jobs.freed_memory import give_freed_memory_back
from trainers.steps.target import Target

STAND_INS = 3
"""On a CPU a step that is recorded takes at most so many times the bytes of all its tensors."""
TIDY_SECONDS = 0.2
"""Giving memory back takes about a millisecond."""


class Tenancy:
    """One device's. Only the holder of the baton calls it."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._stage: Stage | None = None
        self._armed = False
        self._first: Target | None = None
        """The target of the job that came first."""
        self._tidied = 0.0
        self.costs: Costs | None = None
        """The device's rates, once a job has measured them."""

    def runner(self, plan: Plan, key: Hashable, target: Target) -> Runner:
        """Return a runner of this plan on the device's stage."""
        return Runner(plan, key=key, stage=self._stage_for(plan, target))

    def _stage_for(self, plan: Plan, target: Target) -> Stage:
        if self._stage is None:
            workers = plan.costs.host_workers
            self._stage = Stage(
                target.device,
                target.engine,
                host_workers=workers,
                host_dir=target.host_dir,
            )
            self._first = target
            self._stage.gate.armed = self._armed
        for name in ("engine", "host_dir"):
            asked, had = getattr(target, name), getattr(self._first, name)
            if asked != had:
                raise FleetError(
                    f"{name}={asked!r} was asked for, but the device's other jobs run on {had!r}:"
                    f" give all jobs of a fleet the same {name}"
                )
        return self._stage

    @property
    def stage(self) -> Stage | None:
        return self._stage

    def expect_cuts(self) -> None:
        """Note that steps may have to stand aside: engines enqueue less ahead from now on."""
        self._armed = True
        if self._stage is not None:
            self._stage.gate.armed = True

    def memory(self, plan: Plan) -> JobMemory:
        """Return what a job with this plan takes of the host."""
        needed = needs(plan)
        passing = needed.passing * (STAND_INS if self._on_cpu else 1)
        arena = plan.device_bytes if self._on_cpu else 0
        return JobMemory(needed.held, passing, arena_bytes=arena, turn_bytes=plan.device_bytes)

    def tail_seconds(self, plan: Plan) -> float:
        """Return how long only host nodes run at the end of a step, while the device has nothing to
        do. Kernels on a CPU need the cores that the host's updates have: there it is nothing."""
        if self._on_cpu:
            return 0.0
        return tail_seconds(plan.memgraph, plan.simulation.timeline)

    @property
    def swapped_seconds(self) -> float:
        """The seconds that all changes of tenants have taken so far."""
        return self._stage.swaps.seconds if self._stage is not None else 0.0

    def tidy(self, at_once: bool) -> None:
        """Give freed memory back to the machine, at once or if it is some time since the last
        time."""
        if at_once or time.monotonic() - self._tidied >= TIDY_SECONDS:
            give_freed_memory_back()
            self._tidied = time.monotonic()

    def close(self, error: BaseException | None = None) -> None:
        """End the stage. After a lost device nothing is read from it."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.gate.close()  # no step comes for which a bystander could wait
            if isinstance(error, DeviceLost):
                stage.abandon()
            else:
                stage.close()
