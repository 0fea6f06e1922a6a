"""Keeps back host addresses that the host's tasks have freed, while its workers go on. Pure.

    worker 0   |---- u1 reads a ----|---- u4 reads d ----|      Whoever writes to `a` waits for u1.
    worker 1      |---- u2 reads b ----|                        If the next gradient lay in `a`, its
    worker 2         |---- u3 reads c ----|                     update would wait for u1, too, and
                                                                one worker would run at a time.

An address is given out again when the host has done `BESIDE` times the work that all workers do
while the tasks run that touched it: once for what runs beside them, once for what is copied and
cast ahead. Sizes differ, so work is counted and not tasks. Where the arena has no other room, the
address that is due first is given out at once: that costs a wait, but no bytes.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from offload.planning.arena import Piece, Space

BESIDE = 2


class HeldAddresses:
    """The free addresses of the host's arena, and those that will be free later."""

    def __init__(self, space: Space, workers: int) -> None:
        """`workers`: how many tasks the host runs at once. 0: every address is free at once."""
        self._space, self._workers = space, workers
        self._work = 0.0
        """Seconds of all tasks of the host so far."""
        self._held: list[tuple[float, int, Sequence[Piece]]] = []
        """A heap: the work after which an address is due, the address, its history."""

    def ran(self, seconds: float) -> None:
        """Count a task of the host, and free what is due by now."""
        self._work += seconds
        while self._held and self._held[0][0] <= self._work:
            self._free_next()

    def give(self, offset: int, pieces: Sequence[Piece], seconds: float) -> None:
        """Free an address. `seconds`: of all tasks of the host that touched it."""
        if not (self._workers and seconds):
            self._space.give(offset, pieces)
            return
        due = self._work + BESIDE * self._workers * seconds
        heappush(self._held, (due, offset, pieces))

    def best_fit(self, nbytes: int) -> int | None:
        """Where to put `nbytes`. None if there is no room though nothing is held back any more."""
        while (found := self._space.best_fit(nbytes)) is None and self._held:
            self._free_next()
        return found

    def _free_next(self) -> None:
        _, offset, pieces = heappop(self._held)
        self._space.give(offset, pieces)
