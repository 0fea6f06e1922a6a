"""A thread that reads for another one, which waits `timeout` seconds for a sample and no longer.

    worker of the pool --- ids of a chunk ---> reading thread: dataset[id], one by one
                       <-- sample or error --'
                       '-- after `timeout`: it is left behind, and a new one takes its place

Nobody can end a thread. One that is left behind stays where it hangs, keeps its memory, and ends
when the read does, whose sample is dropped. As a daemon it does not keep the program from ending.
"""

import logging
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from loaders.closing import ClosedAtEnd
from loaders.errors import PassEnded, SampleTimeout
from loaders.slots.leaves import Chunk

log = logging.getLogger(__name__)

JOIN_SECONDS = 10.0


def describe_exit(code: int | None) -> str:
    """What the exit code of a process says."""
    if code is None or code >= 0:
        return f"with exit code {code}"
    why = {
        signal.SIGKILL: ", often the kernel's doing when memory runs out",
        signal.SIGSEGV: ", a crash in native code",
        signal.SIGBUS: ", memory or disk that ran out under a mapped file",
    }
    return f"by signal {signal.Signals(-code).name}{why.get(signal.Signals(-code), '')}"


def sample_timeout(doing: str, sample_id: int, timeout: float) -> SampleTimeout:
    """The error for a sample at which a worker hangs. `doing`: what it tries, "read" say."""
    return SampleTimeout(
        f"it took longer than timeout={timeout:g} seconds to {doing} sample {sample_id}:"
        f" {doing} that sample by itself to see where it hangs, or raise timeout"
    )


@dataclass(slots=True, eq=False)
class _Requests:
    """The chunks that one thread is to read, and its answers. A new thread gets new ones."""

    asked: SimpleQueue[list[int] | None] = field(default_factory=SimpleQueue[list[int] | None])
    """Chunks to read. None: end."""
    answers: SimpleQueue[Chunk] = field(default_factory=SimpleQueue[Chunk])
    """A sample at a time, or the error in its place."""
    left: bool = False
    """Whether nobody waits for answers any more."""


class ReadingThread(ClosedAtEnd):
    """Reads samples of `dataset`, in a thread that is replaced when a sample takes too long."""

    def __init__(self, dataset: Any, timeout: float, name: str) -> None:
        self._dataset = dataset
        self._timeout = timeout
        self._name = name
        self._requests = _Requests()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def read(self, ids: Sequence[int], keys: Sequence[int] = (), frozen: bool = False) -> Chunk:
        """Read samples, on one thread at a time, whose generators `keys` do not seed."""
        if self._stopped:
            raise PassEnded(f"thread {self._name} was closed: it reads no more samples")
        samples: list[Any] = []
        requests = self._requests
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._dataset, requests), name=self._name, daemon=True
            )
            self._thread.start()
        requests.asked.put([int(i) for i in ids])
        try:
            while len(samples) < len(ids):
                answer = requests.answers.get(timeout=self._timeout)
                if answer.error is not None:
                    return Chunk(samples, answer.error)
                samples += answer.samples
        except Empty:
            self._leave()
            error = sample_timeout("read", int(ids[len(samples)]), self._timeout)
            log.warning("thread %s is left behind, and another one reads: %s", self._name, error)
            return Chunk(samples, error)
        except BaseException:  # a Ctrl-C: answers under way would be taken for the next ones
            self._leave()
            raise
        return Chunk(samples)

    def stop(self) -> None:
        self._stopped = True
        self._requests.left = True
        self._requests.asked.put(None)

    def close(self) -> None:
        """Wait for the thread, with a bound. It is safe to call this again."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _leave(self) -> None:
        self._requests.left = True
        self._requests.asked.put(None)
        self._requests, self._thread = _Requests(), None


def _serve(dataset: Any, requests: _Requests) -> None:
    while (ids := requests.asked.get()) is not None:
        for sample_id in ids:
            if requests.left:
                return
            try:
                answer = Chunk([dataset[sample_id]])
            except BaseException as error:
                answer = Chunk([], error)
            requests.answers.put(answer)
            if answer.error is not None:
                break
