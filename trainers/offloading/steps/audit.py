"""When the steps of a fit are traced once more, to find what no watch has seen.

micro-batches 4, 8, 16, then whenever the audits so far took less than a share of the time
"""

from time import monotonic

import lightning as L

from offload import CaptureError

EARLY = (4, 8, 16)
"""These micro-batches are audited whatever it takes."""
EDGES = 4
"""So are so many that are the first or the last one of an epoch, where steps often differ."""


def check_part(audit: float) -> None:
    """Raise `ValueError` if this is no part of the time."""
    if isinstance(audit, bool) or not isinstance(audit, int | float) or not 0 <= audit < 1:
        raise ValueError(f"audit={audit!r}: give a part of the time, from 0 to less than 1")


def at_edge(trainer: L.Trainer) -> bool:
    """Whether this micro-batch is the first or the last one of an epoch."""
    return trainer.is_last_batch or trainer.fit_loop.epoch_loop.batch_idx == 0


def in_doubt(why: str, before: int, now: int) -> CaptureError:
    """Return the error for a step that does something else although nothing watched has changed.
    `before`, `now`: the micro-batches of the last audit and of this one."""
    return CaptureError(
        f"the step does something else than when it was captured ({why}), but no value that"
        f" OffloadStrategy watches has changed. The steps after micro-batch {before} up to this one"
        f" ({now}) may be wrong. State that cannot be watched (in a C extension, behind"
        " object.__getattribute__) must be kept in a tensor"
    )


class AuditSchedule:
    """Decides when the next audit is due."""

    def __init__(self, share: float) -> None:
        """`share`: the part of the time that audits may take; 0 means that there are none."""
        self._share = share
        self._count = 0
        self._begun = 0.0
        self._spent = 0.0
        self._edges = 0
        self.last = 0
        """The micro-batch of the last audit."""

    @property
    def count(self) -> int:
        """The number of micro-batches so far."""
        return self._count

    def due(self, edge: bool) -> bool:
        """Count a micro-batch, and return whether it is audited. `edge`: whether it is the first or
        the last one of an epoch."""
        self._count += 1
        if not self._share:
            return False
        if self._count == 1:
            self._begun = monotonic()
        if edge and self._edges < EDGES:
            self._edges += 1
            return True
        if self._count in EARLY:
            return True
        if self._count < EARLY[-1]:
            return False
        return self._spent < self._share * (monotonic() - self._begun)

    def done(self, seconds: float) -> None:
        self._spent += seconds
        self.last = self._count
