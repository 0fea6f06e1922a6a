"""The thread that runs kernels for a session, while the loop's own thread waits or goes on.

run(work)     a part of a step whose Python waits for a value
begin(work)   a step that is over for Python, which is at the next one

It has no mode of the user's. All else that bits depend on is as in the loop's thread.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import torch
from torch import set_num_threads  # a session replaces `torch.set_num_threads`

T = TypeVar("T")


class KernelThread:
    """A context manager."""

    def __init__(self, core: Any, serve: Callable[[], None]) -> None:
        """`serve` is called in it first."""
        self._core = core
        self._pool = ThreadPoolExecutor(1, "live-kernels", serve)

    def __enter__(self) -> "KernelThread":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def begin(self, work: Callable[[], T]) -> "Future[T]":
        """What is begun runs in this order."""
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        alike = torch.get_num_threads(), self._core.rounding(), stream
        return self._pool.submit(partial(self._run, work, *alike))

    def run(self, work: Callable[[], T]) -> T:
        """Begin it, and wait for it."""
        begun = self.begin(work)
        wait_for(begun)
        return begun.result()

    def _run(self, work: Callable[[], T], threads: int, rounding: bytes, stream: Any) -> T:
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
        self._core.set_rounding(rounding)
        with torch.cuda.stream(stream):
            return work()


def wait_for(begun: "Future[Any]") -> None:
    """Wait for its end, after Ctrl-C, too: nothing runs behind the loop's back."""
    try:
        wait([begun])
    finally:
        wait([begun])
