"""A job's right to run its code and to use its device.

    job's thread   | record, plan ... wait | step step step | wait ........ | step step | wait
    the device          Start -> Planned        Turn -> TurnEnded                Turn -> ...

A job's thread runs from a grant to its answer. Meanwhile no other thread of this process runs a
job's code, records a step, or uses the device. While the job waits, its random state is kept here.
"""

import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import lightning as L
import torch

from loaders.workers.precedence import Precedence
from trainers.fleet.deciding.events import Event, Leave, Start, Turn
from trainers.fleet.jobs.tenancy import Tenancy
from trainers.random_state import RandomState

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
        """Whether a step of the job stands aside now."""
        self.step_error: BaseException | None = None
        """What went wrong while a step stood aside. The weights cannot be trusted then."""
        self.leave_reason = ""
        """Why the job has to leave now; empty if it need not."""
        self.waited = 0.0
        """The seconds that the job has waited for grants."""
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
    """Let the loaders of a job decode after those of other jobs, or before them again. Only our own
    loaders can."""
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
