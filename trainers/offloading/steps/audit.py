"""When the steps of a fit are traced once more, to find what no watch has seen.

micro-batches 4, 8, 16, then whenever the audits so far took less than a share of the time
"""

from time import monotonic

EARLY = (4, 8, 16)
"""These micro-batches are audited whatever it takes."""


class AuditSchedule:
    """Decides when the next audit is due."""

    def __init__(self, share: float) -> None:
        """`share`: the part of the time that audits may take; 0 means that there are none."""
        self._share = share
        self._count = 0
        self._begun = 0.0
        self._spent = 0.0
        self.last = 0
        """The micro-batch of the last audit."""

    @property
    def count(self) -> int:
        """The number of micro-batches so far."""
        return self._count

    def due(self) -> bool:
        """Count a micro-batch, and return whether it is audited."""
        self._count += 1
        if not self._share:
            return False
        if self._count == 1:
            self._begun = monotonic()
        if self._count in EARLY:
            return True
        if self._count < EARLY[-1]:
            return False
        return self._spent < self._share * (monotonic() - self._begun)

    def done(self, seconds: float) -> None:
        self._spent += seconds
        self.last = self._count
