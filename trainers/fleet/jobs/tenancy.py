"""The stage of one device, and what its jobs take of the memory."""

import sys
import time
from collections.abc import Callable, Hashable, Iterator
from ctypes import CDLL, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lightning as L
import torch

from loaders.workers.precedence import Precedence
from offload import Plan, Runner
from offload.errors import DeviceLost
from offload.memory.host_needs import needs
from offload.planning.host_tails import tail_seconds
from offload.running.stage import Stage
from trainers.fleet.deciding.events import Event, FleetError, JobMemory, Leave, Start, Turn
from trainers.fleet.inputs.input_link import InputAddress
from trainers.random_state import RandomState
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
        self.stage: Stage | None = None
        self._expects_cuts = False
        self._first: Target | None = None
        self._tidied_at = 0.0
        self._jobs = 0

    def join(self) -> None:
        """A job has come to the device."""
        self._jobs += 1

    def leave(self) -> None:
        """A job leaves the device. After the last one it holds no memory: the next job to have it
        may be one of another process, which has several devices."""
        self._jobs -= 1
        if not self._jobs:
            self.close()

    def runner(self, plan: Plan, key: Hashable, target: Target) -> Runner:
        """Return a runner of this plan on the device's stage."""
        if self.stage is None:
            workers = plan.costs.host_workers
            self.stage = Stage(
                target.device,
                target.engine,
                host_workers=workers,
                host_dir=target.host_dir,
            )
            self._first = target
            self.stage.gate.armed = self._expects_cuts
        for name in ("engine", "host_dir"):
            asked, had = getattr(target, name), getattr(self._first, name)
            if asked != had:
                raise FleetError(
                    f"{name}={asked!r} was asked for, but the device's other jobs run on {had!r}:"
                    f" give all jobs of a fleet the same {name}"
                )
        return Runner(plan, key=key, stage=self.stage)

    def expect_cuts(self) -> None:
        """Prepare for steps that stand aside: engines enqueue less ahead from now on."""
        self._expects_cuts = True
        if self.stage is not None:
            self.stage.gate.armed = True

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
        return self.stage.swaps.seconds if self.stage is not None else 0.0

    def tidy(self, at_once: bool) -> None:
        """Give freed memory back to the machine, `at_once` or only if the last time is long ago."""
        if at_once or time.monotonic() - self._tidied_at >= TIDY_SECONDS:
            give_freed_memory_back()
            self._tidied_at = time.monotonic()

    def close(self, error: BaseException | None = None) -> None:
        """End the stage. After a lost device nothing is read from it."""
        stage, self.stage = self.stage, None
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


@dataclass(frozen=True, slots=True)
class SeatSettings:
    """The settings of all jobs of one device."""

    device: torch.device
    number: int
    budget: str | int | None
    metric: str | None
    checkpoint_seconds: float
    """The age at which a job's checkpoint is replaced."""
    plans: Path | None = None
    """The folder in which jobs of equal steps share plans and measurements."""
    devices: int = 1
    """A job has so many devices, from this one on."""
    most_devices: int = 1
    """So many it may have later."""
    inputs: InputAddress | None = None
    """The process that reads for the jobs of several processes; None if there is one process."""


Grant = Start | Turn | Leave
SETTLING = 3
"""After this many hand-overs a job has recorded and planned its steps and its first validation,
which leave most memory to give back."""


class Baton:
    """One job's. The device's host calls `give`, the job's thread everything else."""

    def __init__(
        self,
        device: torch.device,
        random_state: RandomState,
        tenancy: Tenancy,
        send: Callable[[Event], None],
    ) -> None:
        self.grant: Grant | None = None
        """What the job does now: from the moment of the grant to its answer."""
        self.stands_aside = False
        self.step_error: BaseException | None = None
        """What went wrong while a step stood aside. The weights cannot be trusted then."""
        self.leave_reason = ""
        self.waited = 0.0
        self._device = device
        self._random_state = random_state
        self._tenancy = tenancy
        self._send = send
        self._grants: SimpleQueue[Grant | None] = SimpleQueue()
        self._hand_overs = 0

    def give(self, grant: Grant | None) -> None:
        """Let the job go on. None ends it where it waits."""
        if grant is not None:
            self.grant = grant
        self._grants.put(grant)

    def hand_over(self, event: Event) -> None:
        """Keep the random state, and give the device back with this event."""
        self._random_state, self.grant = RandomState.capture(self._device), None
        self._send(event)

    def tidy(self) -> None:
        """Give freed memory back to the machine."""
        self._hand_overs += 1
        self._tenancy.tidy(at_once=self._hand_overs <= SETTLING)

    def wait(self, trainer: L.Trainer | None, keep_end: bool = False) -> Grant | None:
        """Wait for a grant, and restore the random state. None: the fleet has ended. `keep_end`:
        the next call returns None as well, then."""
        began = time.monotonic()
        _set_loaders_behind(trainer, True)
        grant = self._grants.get()
        _set_loaders_behind(trainer, False)
        if grant is None and keep_end:
            self._grants.put(None)
        if grant is not None or keep_end:
            self._random_state.restore(self._device)
        self.waited += time.monotonic() - began
        if isinstance(grant, Leave):
            self.leave_reason = grant.why
        return grant


def _set_loaders_behind(trainer: L.Trainer | None, behind: bool) -> None:
    """Let our own loaders of a job decode after those of other jobs, or before them again."""
    if trainer is None:
        return
    for loader in (*_flatten(trainer.train_dataloader), *_flatten(trainer.val_dataloaders)):
        precedence = getattr(loader, "precedence", None)
        if isinstance(precedence, Precedence):
            precedence.gives_way = behind


def _flatten(loaders: Any) -> Iterator[Any]:
    """Yield each loader of what Lightning was given: one, or several in lists and dicts."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if not isinstance(loaders, list | tuple):
        yield loaders
        return
    for part in loaders:
        yield from _flatten(part)
