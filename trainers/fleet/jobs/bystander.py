"""Hands a device over between two nodes of a step, for a job of higher priority.

    the job's thread   | step: F1 F2 | stands aside .................... | F3 ... | turn ends
    the bystander      asks the gate | TurnEnded, bytes out .. grant, bytes back |
    other jobs                                  | Start, Turn, Turn |

The job's thread waits inside its step, so somebody else has to send its event and to wait for its
next grant. What cannot be cut (the Python of a step, a batch of plain Lightning, the end of a pass)
is waited for: the bystander asks again until nodes of a planned step run, or the turn is over.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING

from offload.errors import OffloadError
from offload.running.stage import Stage
from trainers.fleet.deciding.events import Turn
from trainers.fleet.jobs.tenancy import Tenancy

if TYPE_CHECKING:
    from trainers.fleet.jobs.seat import Seat

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1e-3
"""A step need not be asked more often than this."""


class Bystander:
    """Of one turn of a job. It is over when the job has the device again, or its turn has ended."""

    def __init__(self, seat: "Seat", turn: Turn, tenancy: Tenancy) -> None:
        self._seat = seat
        self._tenancy = tenancy
        self.turn = turn
        self._thread = threading.Thread(
            target=self._run, name=f"perfect-job-{seat.name}-aside", daemon=True
        )
        self._thread.start()

    @property
    def _is_on(self) -> bool:
        """Whether the turn is not over."""
        return self._seat.granted is self.turn

    def _run(self) -> None:
        seat = self._seat
        try:
            while self._is_on:
                stage = self._tenancy.stage  # there is none before the first step of all jobs
                if stage is not None:
                    with stage.gate.granted(inside=True):
                        # The job's thread waits for this block, if the turn is still its own.
                        if self._is_on and stage.runs_in is not None:
                            self._hand_over(stage)
                            return
                time.sleep(PAUSE_SECONDS)
        except BaseException as error:
            seat.spoilt = error

    def _hand_over(self, stage: Stage) -> None:
        seat = self._seat
        asked = False
        try:
            with stage.standing_aside() as copies:
                asked = True
                seat.stand_aside(copies.make)
        except OffloadError as error:
            if asked:
                raise
            log.warning("the turn of job %s ends after its step: %s", seat.name, error)
