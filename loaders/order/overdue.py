"""Slots of a rolling buffer whose most overdue samples are served next.

    due(i, n)   R * i + n * capacity: position i's n-th serve, counted in serves

A batch is made of the most overdue samples. Who was served less than half a buffer ago waits if it
can. Where the serves run out, a sample with as many serves left as there are full batches left is
critical and goes first (McNaughton's wrap-around argument), so that nobody comes twice in a batch.
"""

from dataclasses import dataclass

import numpy as np

from loaders.order.serve import IntArray, Residents, Serve

NEVER = -(1 << 40)
"""The latest batch of a sample that was not served yet."""


@dataclass(slots=True, eq=False)
class Slots:
    """Who is in which slot before batch `batch`."""

    position: IntArray
    served: IntArray
    """The reuse, where a slot is free: its sample was served to its end."""
    first: IntArray
    """The batch of the first serve."""
    last: IntArray
    """The batch of the latest serve of this slot, whoever was in it."""
    due: IntArray
    """[slots, reuse]: when each serve of its sample is due."""
    entered: int
    """So many positions are or were in a slot."""
    batch: int
    outstanding: int
    """So many serves are still to come in the pass."""

    def residents(self, reuse: int) -> Residents:
        there = np.flatnonzero((self.served < reuse) & (self.position < self.entered))
        there = there[np.argsort(self.position[there])]
        first = np.where(self.served[there] > 0, self.first[there], -1)
        return Residents(self.position[there], self.served[there], first, self.entered)

    def serve(self, size: int, gap: int) -> tuple[IntArray, Serve]:
        """Choose the next batch of `size` samples; `gap` batches should lie between two serves of
        one. Returns its slots, too."""
        reuse = self.due.shape[1]
        alive = self.served < reuse
        uses_left = reuse - self.served
        rested = (self.served == 0) | (self.batch - self.last >= gap)
        critical = np.where(uses_left >= self.outstanding // size, uses_left, 0)
        next_due = self.due[np.arange(len(alive)), np.minimum(self.served, reuse - 1)]
        ranked = np.lexsort((next_due, ~rested, -critical, ~alive))
        chosen = ranked[: min(size, self.outstanding)]
        assert alive[chosen].all(), f"the order ran out of samples at batch {self.batch}"
        return chosen, Serve(self.position[chosen], self.served[chosen])

    def end_batch(self, chosen: IntArray, samples: int) -> None:
        """Count a batch. Slots that fall free get the next of `samples` positions."""
        self.first[chosen[self.served[chosen] == 0]] = self.batch
        self.last[chosen] = self.batch
        self.served[chosen] += 1
        self.outstanding -= len(chosen)
        self.batch += 1
        self.admit(samples)

    def admit(self, samples: int) -> None:
        """Give free slots to the next positions. Each is due a life after whoever was there."""
        slots, reuse = self.due.shape
        if self.entered >= samples:
            return
        free = np.flatnonzero(self.served == reuse)
        free = free[np.argsort(self.due[free, 0], kind="stable")][: samples - self.entered]
        self.position[free] = np.arange(self.entered, self.entered + len(free))
        self.due[free] += slots * reuse
        self.served[free] = 0
        self.entered += len(free)
