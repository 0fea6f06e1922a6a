"""Lets a guest use the device between two nodes of a step, and gives the step its device back.

    the step    | F1 | F2 |  stands aside ....................  | F3 |
    a guest         ^ asks | granted ..... gives back | the next guest

The thread of a step holds the gate while nodes run, and looks at `wanted` between two of them. If
guests wait there, the step stands aside for them. Who asks later comes after the next node, so the
step goes on however many ask. Where no step runs, a guest is granted at once, and a step that
begins meanwhile waits. Guests come one at a time: the highest priority first, and among equals the
one that asked first.

A guest has memory of its own. One that borrows the step's memory says `inside`: it is granted only
while the step's thread stands aside, because between two steps that thread reads tensors.

A Ctrl-C that hits a step which stands aside is raised when the guest has given back; a second one
at once.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from offload.errors import StepError

LOOK_SECONDS = 0.5
"""Seconds until a thread notices a Ctrl-C that hits just before it begins to wait."""


def _make_bell() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _ring(bell: threading.Lock) -> None:
    """Wake the thread that waits for the bell. Call it under the gate's lock."""
    if bell.locked():
        bell.release()


@dataclass(slots=True, eq=False)
class Guest:
    """One use of the gate, with its times by the gate's clock."""

    priority: int
    number: int
    """Guests are numbered from 1 as they ask."""
    inside: bool
    thread: int
    asked: float
    granted: float = 0.0
    ended: float = 0.0
    bell: threading.Lock = field(default_factory=_make_bell)


@dataclass(slots=True, eq=False)
class _StepSide:
    """What the gate knows of the thread that runs steps."""

    thread: int | None = None
    """The thread of the step that holds the gate or stands aside."""
    last_thread: int | None = None
    """The thread of the last step."""
    runs: bool = False
    """Whether nodes of a step may run now."""
    stands_aside: bool = False
    waits_elsewhere: bool = False
    """Whether it waits for something else than the gate, and will ask before it goes on."""
    bell: threading.Lock = field(default_factory=_make_bell)


class Gate:
    """Each device has one. A `closed` gate grants everything: no step comes any more."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.wanted = False
        """Whether a guest waits. A step reads it between two nodes, without the lock."""
        self.armed = False
        """Whether guests are expected. Then engines enqueue less ahead, so that none waits long."""
        self.stood_aside = 0.0
        """Seconds in which a step could have run and stood aside for guests."""
        self._clock = clock
        self._lock, self._process = threading.Lock(), os.getpid()
        self._step = _StepSide()
        self._guest: Guest | None = None
        self._waiting: list[Guest] = []
        self._asked_so_far = 0
        self._served_up_to = 0
        """The number of the last guest for which the step stands aside."""
        self._closed = False

    # ---- for a step ------------------------------------------------------------------------------

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the gate for a step, or for a capture of one. The holder may hold it again."""
        if self._step.thread == threading.get_ident():
            yield
            return
        before, here.gate = here.gate, self
        try:
            self._enter()
            yield
        finally:
            here.gate = before
            self._leave()

    def pass_on(self) -> None:
        """Stand aside until no guest waits. Only the holder's thread has an effect."""
        if self._step.thread != threading.get_ident() or not self._step.runs:
            return
        self._enter()

    @contextmanager
    def rested(self, *, inside: bool = True) -> Iterator[None]:
        """Let guests in while the step waits in this block for something else than the gate.
        `inside`: those that borrow its memory, too."""
        with self._lock:
            self._step.runs, self._step.waits_elsewhere = False, inside
            self._let_next_in()
        try:
            yield
        finally:
            self._enter()

    def _enter(self) -> None:
        """Stand aside for the guests that have asked so far, then let the step run."""
        with self._lock:
            step = self._step
            step.thread = step.last_thread = threading.get_ident()
            step.runs = step.waits_elsewhere = False
            step.stands_aside, self._served_up_to = True, self._asked_so_far
            self._let_next_in()
        if not step.runs:
            self._await_turn()

    def _leave(self) -> None:
        with self._lock:
            step = self._step
            step.runs = step.stands_aside = step.waits_elsewhere = False
            step.thread = None
            self._let_next_in()

    def _await_turn(self) -> None:
        begin, hits = self._clock(), 0
        while not self._step.runs:
            try:
                self._step.bell.acquire(timeout=LOOK_SECONDS)
            except KeyboardInterrupt:
                hits += 1
                if hits > 1:
                    raise
        self.stood_aside += self._clock() - begin
        if hits:
            raise KeyboardInterrupt

    # ---- for a guest -----------------------------------------------------------------------------

    @contextmanager
    def granted(self, priority: int = 0, *, inside: bool = False) -> Iterator[Guest]:
        """Wait for the gate, and have it in this block."""
        if os.getpid() != self._process:
            raise StepError(
                f"this gate belongs to process {self._process}, and process {os.getpid()} was"
                " forked from it: it has none of its threads. Ask in the process that trains"
            )
        guest = Guest(priority, 0, inside, threading.get_ident(), self._clock())
        try:  # a Ctrl-C can hit between any two lines, and a guest that is forgotten stops all
            self._ask(guest)
            while self._guest is not guest:
                guest.bell.acquire(timeout=LOOK_SECONDS)
            yield guest
        finally:
            self._give_back(guest)

    def _ask(self, guest: Guest) -> None:
        with self._lock:
            me = guest.thread
            guest.inside = guest.inside and not self._closed
            if me == self._step.thread or (guest.inside and me == self._step.last_thread):
                raise StepError(
                    "this call comes from the thread that trains, and would wait for itself: call"
                    " from another thread"
                )
            if self._guest is not None and me == self._guest.thread:
                raise StepError("this thread has the gate already: it would wait for itself")
            self._asked_so_far += 1
            guest.number = self._asked_so_far
            self._waiting.append(guest)
            self._let_next_in()

    def _give_back(self, guest: Guest) -> None:
        with self._lock:
            guest.ended = self._clock()
            if self._guest is guest:
                self._guest = None
            elif guest in self._waiting:  # a Ctrl-C has ended the wait
                self._waiting.remove(guest)
            self._let_next_in()

    # ---- whose turn it is, under the lock --------------------------------------------------------

    def _let_next_in(self) -> None:
        """Let the next guest in if the device is free, or else the step that stands aside."""
        if self._guest is None and not self._step.runs:
            able = self._waiting and [guest for guest in self._waiting if self._may_come(guest)]
            if able:
                guest = min(able, key=lambda guest: (-guest.priority, guest.number))
                self._waiting.remove(guest)
                guest.granted = self._clock()
                self._guest = guest
                _ring(guest.bell)
            elif self._step.stands_aside:
                self._step.runs, self._step.stands_aside = True, False
                _ring(self._step.bell)
        self.wanted = bool(self._waiting)

    def _may_come(self, guest: Guest) -> bool:
        if self._step.stands_aside:
            return guest.number <= self._served_up_to
        return self._step.waits_elsewhere or not guest.inside

    @property
    def closed(self) -> bool:
        """Whether no step comes any more."""
        return self._closed

    def open(self) -> None:
        """Steps will come."""
        with self._lock:
            self._closed = False

    def close(self) -> None:
        """No step comes any more: guests that wait for one are let in. It may be called again."""
        with self._lock:
            self._closed = True
            for guest in self._waiting:
                guest.inside = False
            self._let_next_in()


class _Here(threading.local):
    gate: Gate | None = None


here = _Here()
"""The gate that this thread holds, for work that asks between its parts: a capture, a profile."""


@contextmanager
def only_python() -> Iterator[None]:
    """Let guests with memory of their own in while this block computes in Python, and neither uses
    the device nor changes what a guest could see."""
    gate = here.gate
    if gate is None:
        yield
        return
    with gate.rested(inside=False):
        yield


def stand_aside() -> None:
    """Let a guest in if one waits for the gate that this thread holds."""
    gate = here.gate
    if gate is not None and gate.wanted:
        gate.pass_on()
