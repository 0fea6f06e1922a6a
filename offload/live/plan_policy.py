"""Which steps of a session get a plan, and one warning for each reason why one gets none."""

import logging
import warnings
from typing import Any

log = logging.getLogger(__name__)

MOST_NEW = 32
"""If so many steps in a row were each a new one, the next new ones are not planned."""
MOST_TAPES = 64
"""If there are more, all are forgotten."""


class PlanPolicy:
    """Counts the tapes of a session."""

    def __init__(self, plans_first_steps: bool) -> None:
        """`plans_first_steps`: whether a step is planned when it comes for the first time."""
        self.plans_first_steps = plans_first_steps
        self._unplanned: set[tuple[int, int]] = set()
        """The parts of tapes that cannot be planned."""
        self._warned: set[str] = set()
        self._new_in_a_row = 0
        self._tapes = 0

    @property
    def has_too_many_tapes(self) -> bool:
        return self._tapes > MOST_TAPES

    def forget(self) -> None:
        self._unplanned.clear()
        self._tapes = 0

    def count(self, tape: Any) -> None:
        """Count a step that has ended."""
        self._new_in_a_row = self._new_in_a_row + 1 if tape.recorded else 0
        self._tapes += tape.recorded

    def may_plan(self, tape: Any, step: str) -> bool:
        """Whether the step of this name is worth a plan: its tape came before, or there is a budget
        to keep."""
        if tape.recorded and self.plans_first_steps and self._new_in_a_row >= MOST_NEW:
            self._warn_once(step, f"each of {MOST_NEW} steps in a row was another one", 4)
            return False
        return self.plans_first_steps or not tape.recorded

    def can_plan(self, tape: Any) -> bool:
        """Whether nobody has found out that this part of the tape cannot be planned."""
        return (tape.begin, tape.leaf) not in self._unplanned

    def refuse(self, tape: Any, step: str, reason: str) -> None:
        """Note that this part of the tape cannot be planned."""
        self._unplanned.add((tape.begin, tape.leaf))
        self._warn_once(step, reason, 5)

    def _warn_once(self, step: str, reason: str, stacklevel: int) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            log.info("step %s has no plan: %s", step, reason)
            text = f"a step runs as it is issued, without a plan and a budget: {reason}"
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)
