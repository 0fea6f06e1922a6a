"""The stage of one device, and what its jobs take of the memory.

All jobs of a device share its stage: one arena, one engine. The stage is made when the first job
has a plan.
"""

import sys
import time
from collections.abc import Hashable
from ctypes import CDLL, c_size_t, c_void_p

import torch

from offload import Plan, Runner
from offload.errors import DeviceLost
from offload.memory.host_needs import needs
from offload.planning.host_tails import tail_seconds
from offload.running.stage import Stage
from trainers.fleet.deciding.events import JobMemory
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.steps.target import Target

RECORDING_COPIES = 3
"""On a CPU recording a step takes at most this many times the bytes of all its tensors."""
TIDY_SECONDS = 0.2
"""The time between two calls that give memory back. A call takes about a millisecond."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
LARGEST_THRESHOLD = 32 * 2**20
"""glibc itself raises the threshold of a block no further. Tensors below it are taken from the
memory of the thread, larger ones from the system."""
LARGE_BLOCK = 128 * 2**10
"""Only if a block of this size is freed, glibc looks at what lies above the last block."""


class Tenancy:
    """One device's. Only the job with the baton calls it."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._stage: Stage | None = None
        self._expects_cuts = False
        self._first: Target | None = None
        """The target of the first job."""
        self._tidied_at = 0.0

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
            self._stage.gate.armed = self._expects_cuts
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
        """Prepare for steps that stand aside: engines enqueue less ahead from now on."""
        self._expects_cuts = True
        if self._stage is not None:
            self._stage.gate.armed = True

    def memory(self, plan: Plan) -> JobMemory:
        """Return what a job with this plan takes of the host."""
        needed = needs(plan)
        passing = needed.passing * (RECORDING_COPIES if self._on_cpu else 1)
        arena = plan.device_bytes if self._on_cpu else 0
        return JobMemory(needed.held, passing, arena_bytes=arena, turn_bytes=plan.device_bytes)

    def tail_seconds(self, plan: Plan) -> float:
        """Return how long only host nodes run at the end of a step, while the device is idle. It is
        0 on a CPU, where kernels need the cores that run the host's updates."""
        if self._on_cpu:
            return 0.0
        return tail_seconds(plan.memgraph, plan.simulation.timeline)

    @property
    def swapped_seconds(self) -> float:
        """The seconds that all changes of tenants have taken so far."""
        return self._stage.swaps.seconds if self._stage is not None else 0.0

    def tidy(self, at_once: bool) -> None:
        """Give freed memory back to the machine, `at_once` or only if the last time is long ago."""
        if at_once or time.monotonic() - self._tidied_at >= TIDY_SECONDS:
            give_freed_memory_back()
            self._tidied_at = time.monotonic()

    def close(self, error: BaseException | None = None) -> None:
        """End the stage. After a lost device nothing is read from it."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.gate.close()  # a bystander waits for no more steps
            if isinstance(error, DeviceLost):
                stage.abandon()
            else:
                stage.close()


def give_freed_memory_back() -> None:
    """Give the memory that this thread has freed back to the system. Without glibc it does nothing.

    glibc keeps freed memory for the thread that freed it, and every job has a thread of its own.

        malloc_trim        frees the pages of all holes between blocks, of every thread
        a free of a block  frees what lies above the last block, of the calling thread only, if
                           that is more than the trim threshold

    The job's own thread does both. Between two hand-overs the threshold is high, because a step
    takes and frees the same memory again and again."""
    libc = CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "malloc_trim"):
        return
    libc.malloc.restype, libc.malloc.argtypes = c_void_p, [c_size_t]
    libc.free.restype, libc.free.argtypes = None, [c_void_p]
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD)
    libc.mallopt(M_TRIM_THRESHOLD, 0)
    libc.free(libc.malloc(LARGE_BLOCK))
    libc.malloc_trim(0)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_THRESHOLD)
