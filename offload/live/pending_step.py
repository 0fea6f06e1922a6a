"""Runs the kernels of a session in a thread of their own, which may still run after their step.

loop's thread    | step 7, on shadows | step 8, on shadows      | wait | ...
kernels' thread                       | step 7's kernels ............. | step 8's kernels

At most one step is pending. The loop waits for it at the end of the next step, or earlier where
something needs it: it reads what the kernels write, it draws while they draw, it forks a process.
Nobody else writes what the kernels read: weights are barred, and the inputs of the step are copied,
because any thread may write those.

The thread has no mode of the user's. All else that bits depend on is as in the loop's thread.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import set_num_threads  # a session replaces `torch.set_num_threads`

from offload.live.planned_tapes import PlannedRun

T = TypeVar("T")
EARLY_WAITS, PAUSED_STEPS = 8, 100
"""After so many steps in a row that had to be waited for before the next one's end, so many steps
are not left pending: nothing overlaps, and another thread costs time."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose kernels still run. `dropped` and `stay`: slots, as `finish` of the core takes
    them."""

    run: PlannedRun
    result: "Future[Any]"
    dropped: set[int]
    stay: set[int]


class KernelThread:
    """The thread that runs kernels, and the step that is pending in it."""

    def __init__(self, core: Any, may_overlap: bool) -> None:
        """`may_overlap`: whether kernels may run after the end of their step."""
        self._core = core
        self._may_overlap = may_overlap
        self._lock = threading.Lock()
        """Held while a step is submitted, or overlap is forbidden."""
        self._pool: ThreadPoolExecutor | None = None
        self._pending: PendingStep | None = None
        self._early_waits, self._paused_steps = 0, 0
        self.failed = False
        """Whether kernels have raised after the end of their step."""

    def open(self, serve: Callable[[], None]) -> None:
        """Begin to take work. `serve` is called first in the new thread."""
        self._pool = ThreadPoolExecutor(1, "live-kernels", serve)

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, work: Callable[[], T]) -> T:
        """Run a part of a step whose Python waits for a value."""
        result = self._start(work)
        _wait_for(result)
        return result.result()

    def submit(
        self, prepare: Callable[[], PlannedRun | None], dropped: set[int], stay: set[int]
    ) -> bool:
        """Let the kernels of a step run on while Python goes on, if they have a plan. False: they
        have not begun."""
        if self._paused_steps:
            self._paused_steps -= 1
            return False
        with self._lock:
            if not self._may_overlap:
                return False
            run = prepare()
            if run is None or not run.is_bound:
                return False
            self._core.submit(run.tape)
            self._pending = PendingStep(run, self._start(run.compute), dropped, stay)
        return True

    def wait_early(self) -> None:
        """Wait, because something needs the pending step before the next one's end."""
        if self._pending is None:
            return
        self._early_waits += 1
        if self._early_waits >= EARLY_WAITS:
            self._paused_steps = PAUSED_STEPS
        self.wait()

    def wait(self, *, at_step_end: bool = False) -> None:
        """Wait for the kernels of the latest step, if they still run. An error of theirs is raised
        here. `at_step_end`: this is the end of the next step."""
        if (pending := self._pending) is None:
            return
        if at_step_end:
            self._early_waits = 0
        try:
            _wait_for(pending.result)
        finally:
            self._pending = None
            self._core.complete()
            try:
                pending.run.finish(pending.result.result())
            except BaseException:
                self.failed = True
                pending.run.tape.finish(set(), set())
                raise
            pending.run.tape.finish(pending.dropped, pending.stay)

    def wait_for_kernels(self) -> None:
        """Wait until no kernel runs. Any thread may call this."""
        if (pending := self._pending) is not None:
            _wait_for(pending.result)

    def forbid_overlap(self) -> None:
        """From now on, let no kernel run after the end of its step. Any thread may call this."""
        with self._lock:
            self._may_overlap = False
        self.wait_for_kernels()

    def _start(self, work: Callable[[], T]) -> "Future[T]":
        assert self._pool is not None
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        modes = torch.get_num_threads(), self._core.rounding(), stream
        return self._pool.submit(partial(self._run_in_modes, work, *modes))

    def _run_in_modes(self, work: Callable[[], T], threads: int, rounding: bytes, stream: Any) -> T:
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
        self._core.set_rounding(rounding)
        with torch.cuda.stream(stream):
            return work()


def _wait_for(result: "Future[Any]") -> None:
    """Wait for its end, after Ctrl-C, too: no kernel runs on while the loop does not know."""
    try:
        wait([result])
    finally:
        wait([result])


@cache
def wait_before_forks(core: Any) -> None:
    """Where a process is forked, no kernel of the forking thread's session runs: the child would
    inherit locks that nobody releases."""
    os.register_at_fork(before=core.wait_for_step)
