"""A guest that asks all the time, borrows some of the device's arena and fills it."""

import random
import threading
from types import TracebackType

from offload import Runner

FILL = 0xA5
PATIENCE = 60.0


class Intruder:
    """A context manager: its thread asks in this block. Every visit stops the step between two
    nodes, and lends a random part of each arena if it `evicts`."""

    def __init__(self, runner: Runner, seed: int, evicts: bool) -> None:
        self._stage, self._evicts = runner.stage, evicts
        self._stage.gate.armed = True
        self._chance = random.Random(seed)
        self.visits = 0
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Intruder":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._stage.gate.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                with self._stage.gate.granted(inside=True):
                    if not self._over.is_set():
                        self._visit()
        except BaseException as error:
            self._error = error

    def _visit(self) -> None:
        self.visits += 1
        if not self._evicts:
            return
        arena = self._stage.lender.arena
        assert arena is not None
        sizes = {n: self._chance.randint(1, nbytes) for n, nbytes in arena.sizes.items() if nbytes}
        with self._stage.lend_to_guest(sizes) as lent:
            for region in lent.regions.values():
                region.tensor.fill_(FILL)
