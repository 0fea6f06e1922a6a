"""A gloo group's constructor, on a thread of its own.

It connects each member with each other one, blocks until that is done, and cannot be called off.
So the caller waits beside it, and goes away when the generation has ended. What the constructor
comes to then is the graveyard's.

    form_group   |..poll alive()..|  GenerationEnded
    thread       |..........connects to a member that is dead...... |  error, or a group to bury
"""

import threading
from collections.abc import Callable
from typing import Any

from trainers.elastic.reducing.graveyard import Graveyard, Remains

POLL_SECONDS = 1e-3


class Forming:
    """One constructor. `wait` for it once."""

    def __init__(self, make: Callable[[], Any], rank: int, size: int) -> None:
        self._make = make
        self._rank = rank
        self._size = size
        self._made: Any = None  # A group of gloo's; torch types none of its methods.
        self._error: BaseException | None = None
        self._heir: Graveyard | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-forming", daemon=True)

    def wait(self, alive: Callable[[], None], graveyard: Graveyard) -> Any:
        """Return the group, or raise what the constructor or `alive` raises."""
        self._thread.start()
        try:
            while not self._over.wait(POLL_SECONDS):
                alive()
        except BaseException:
            self._leave_to(graveyard)
            raise
        self._thread.join()
        if self._error is not None:
            raise self._taken_error()
        made, self._made = self._made, None
        assert made is not None
        return made

    def _leave_to(self, heir: Graveyard) -> None:
        """Give up what was made or will be made, and what went wrong or will go wrong."""
        with self._lock:
            self._heir = heir
            made, self._made = self._made, None
            self._error = None
        heir.expect(self._thread)
        if made is not None:
            heir.bury(Remains(made, (), self._rank, self._size))

    def _taken_error(self) -> BaseException:
        """Return the error, which from now on is the caller's alone: its traceback leads to this
        object, and one that leads back to itself waits for the garbage collector."""
        error, self._error = self._error, None
        assert error is not None
        return error

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:
            with self._lock:
                if self._heir is None:
                    self._error = error
        else:
            with self._lock:
                heir = self._heir
                if heir is None:
                    self._made = made
            if heir is not None:
                heir.bury(Remains(made, (), self._rank, self._size))
            del made
        finally:
            self._over.set()
