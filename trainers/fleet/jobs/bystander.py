"""Hands a device over in the middle of a step, for a job of higher priority.

    the job's thread   | step: F1 F2 | stands aside .................... | F3 ... | turn ends
    the bystander      asks the gate | TurnEnded, bytes out .. grant, bytes back |
    other jobs                                  | Start, Turn, Turn |

The job's thread waits inside its step, so this thread sends its event and waits for its next grant.
Some work cannot be cut: the Python of a step, a batch of plain Lightning, the end of a pass. The
bystander asks again until nodes of a planned step run, or the turn is over.
"""

import logging
import threading
import time

from offload.errors import OffloadError
from offload.running.stage import Stage
from trainers.fleet.deciding.events import Turn
from trainers.fleet.jobs.job_turns import JobTurns
from trainers.fleet.jobs.tenancy import Tenancy

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1e-3
"""The time between two questions to a step."""


class Bystander:
    """The hand-over in one turn of a job. It ends when the job has the device again, or when its
    turn has ended."""

    def __init__(self, job: str, turns: JobTurns, turn: Turn, tenancy: Tenancy) -> None:
        self.turn = turn
        self._job = job
        self._turns = turns
        self._tenancy = tenancy
        threading.Thread(target=self._run, name=f"perfect-job-{job}-aside", daemon=True).start()

    def _is_turn_running(self) -> bool:
        return self._turns.baton.grant is self.turn

    def _run(self) -> None:
        try:
            while self._is_turn_running():
                stage = self._tenancy.stage  # there is none before the first step of all jobs
                if stage is not None:
                    with stage.gate.granted(inside=True):
                        # The job's thread waits for this block, if its turn still runs.
                        if self._is_turn_running() and stage.step_thread is not None:
                            self._hand_over(stage)
                            return
                time.sleep(PAUSE_SECONDS)
        except BaseException as error:
            self._turns.baton.step_error = error

    def _hand_over(self, stage: Stage) -> None:
        began = False
        try:
            with stage.let_others_step() as copies:
                began = True
                self._turns.stand_aside(copies.make)
        except OffloadError as error:
            if began:
                raise
            log.warning("the turn of job %s ends after its step: %s", self._job, error)
