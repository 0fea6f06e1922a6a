"""Worker processes read samples where a data set's `__getitem__` holds the GIL.

    pool thread --- ids of a chunk --------------------------------> `worker.work` in the child
                <-- pipe: nest, numbers, words; where arrays lie ---     dataset[id], one by one
    slots <-------- views, no copy -- | staging area | <----------------- arrays (pixels)

Pixels never go through a pipe. No sample is lost or served twice: a chunk is answered up to its
first failure, and the whole chunk is asked for again when its process died. A worker may die once.

The child ends by itself when the pipe closes or its parent is gone, and ignores Ctrl-C. By default
it comes from a fork server, which has no CUDA and none of our threads: forking the training process
would copy locks that other threads hold, and `spawn` imports torch again for each process (1 s
against 10 ms). A user may choose either of them. All methods but `fork` need a data set that can be
pickled and a script that can be imported.
"""

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from mmap import mmap
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NoReturn, cast

from loaders.errors import PassEnded, SourceError, WorkerDied
from loaders.slots.leaves import Chunk, Fetch
from loaders.workers import worker
from loaders.workers.worker import IDLE, PROGRESS, Reply, Staged, change_leaves

log = logging.getLogger(__name__)

StartMethod = Literal["fork", "spawn", "forkserver"]

LOOK_SECONDS = 1.0  # the time between two looks whether the child is still there
END_SECONDS = (5.0, 1.0, 5.0)  # the time to end: by itself, after SIGTERM, after SIGKILL


class _Gone(Exception):
    """The process at the other end is dead or dying."""


def default_start_method() -> StartMethod:
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class WorkerProcess:
    """A process that reads samples of `dataset`. It starts with the first `read`, and is restarted
    once if it dies."""

    def __init__(self, dataset: Any, start_method: StartMethod | None, name: str) -> None:
        self.dataset = dataset
        self.start_method: StartMethod = start_method or default_start_method()
        self.name = name
        self.restarts = 0
        self._parent = os.getpid()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._area: mmap | None = None
        self._stopping = False
        self._reading = threading.Lock()  # held while somebody uses the pipe
        self._changing = threading.Lock()  # held while the pipe is replaced or shut

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def read(self, ids: Sequence[int], keys: Sequence[int] = ()) -> Chunk:
        """Read samples, with the generators seeded by their keys, if there are some. Their arrays
        are tensors over the staging area: copy them before the next `read`. PIL pictures become
        `Picture`s; everything else is as the data set returned it."""
        wanted = [int(i) for i in ids]
        with self._reading:
            try:
                while True:
                    try:
                        return self._ask(wanted, [int(key) for key in keys])
                    except _Gone:
                        self._restart(wanted)
            except BaseException:
                self._end()  # after a Ctrl-C, an answer under way would be taken for the next one
                raise

    def stop(self) -> None:
        """Tell the process to end after its current sample, without waiting for it. Any thread may
        call this."""
        if os.getpid() != self._parent:
            return  # this is a fork of the parent, and the process is not its own
        with self._changing:
            self._stopping = True
            if self._pipe is not None:
                _shut(self._pipe)

    def close(self) -> None:
        """End the process, by force if it does not end by itself. Any thread may call this, and it
        is safe to call it again."""
        atexit.unregister(self.stop)
        if os.getpid() != self._parent:
            return
        self.stop()
        if not self._reading.acquire(timeout=END_SECONDS[0]):
            with self._changing:
                if self._process is not None:
                    self._process.kill()
            # The thread that reads notices the death within LOOK_SECONDS.
            if not self._reading.acquire(timeout=sum(END_SECONDS)):
                return
        try:
            self._end()
        finally:
            self._reading.release()

    # ---- under the lock of `read` ---------------------------------------------------------------

    def _ask(self, ids: list[int], keys: list[int]) -> Chunk:
        pipe = self._pipe or self._start()
        try:
            pipe.send_bytes(pickle.dumps((ids, keys)))
        except OSError as error:
            raise _Gone from error
        reply = self._receive(pipe)
        area = self._area
        assert area is not None

        def unstage(leaf: Any) -> Any:
            return leaf.view(area) if isinstance(leaf, Staged) else leaf

        samples = [change_leaves(pickle.loads(sample), unstage) for sample in reply.samples]
        return Chunk(samples, reply.failure.error(self._who) if reply.failure else None)

    def _start(self) -> Connection:
        context = cast(SpawnContext, multiprocessing.get_context(self.start_method))
        forked = self.start_method == "fork"
        payload = b"" if forked else self._pickled_dataset()
        if self.start_method == "forkserver":
            context.set_forkserver_preload([worker.__name__])  # so the server imports torch once
        ours, theirs = context.Pipe()
        inherited = (ours, self.dataset) if forked else None
        process = context.Process(
            target=worker.work, args=(theirs, inherited), name=self.name, daemon=True
        )
        with self._changing:
            if self._stopping:
                self._refuse()
            process.start()
            theirs.close()
            self._process, self._pipe = process, ours
        atexit.register(self.stop)
        try:
            if payload:
                ours.send_bytes(payload)
            reply = self._receive(ours)
        except (OSError, _Gone) as error:
            how = _how_it_ended(self._end())
            if self._stopping:
                self._refuse()
            raise WorkerDied(
                f"{self._who} ended {how} before it could read a sample; see what it wrote to"
                " stderr. A script that uses processes must be importable: keep its actions under"
                " `if __name__ == '__main__':`, or decode in threads"
            ) from error
        if reply.failure is not None:
            self._end()
            error = reply.failure.error(self._who)
            raise SourceError(
                f"the data set ({self._kind}) cannot be rebuilt in a process of"
                f" its own: {error}; define its class in a module that can be imported, not in a"
                " notebook or a function; or decode in threads"
            ) from error
        return ours

    def _pickled_dataset(self) -> bytes:
        try:
            return pickle.dumps(self.dataset, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise SourceError(
                f"the data set ({self._kind}) cannot be sent to a process of its"
                f" own: {error}; open files, locks and lambdas cannot be pickled: open them in"
                " __getitem__, leave them out in __getstate__, or decode in threads"
            ) from error

    def _receive(self, pipe: Connection) -> Reply:
        process = self._process
        assert process is not None
        try:
            # Waiting for the pipe alone may not end: a process that was forked meanwhile may hold
            # its other end open.
            while not connection.wait([pipe, process.sentinel], LOOK_SECONDS):
                if process.exitcode is not None:
                    break
            if not pipe.poll():
                raise _Gone
            reply: Reply = pickle.loads(pipe.recv_bytes())
            if reply.area_bytes:
                descriptor = reduction.recv_handle(pipe)
                try:
                    self._area = mmap(descriptor, reply.area_bytes)
                finally:
                    os.close(descriptor)
        except (OSError, EOFError) as error:
            raise _Gone from error
        return reply

    def _restart(self, ids: list[int]) -> None:
        at = PROGRESS.unpack_from(self._area)[0] if self._area is not None else IDLE
        how = _how_it_ended(self._end())
        if self._stopping:
            self._refuse()
        sample = f"sample {ids[at]}" if 0 <= at < len(ids) else f"one of the samples {ids}"
        if self.restarts:
            raise WorkerDied(
                f"{self._who} ended {how} while it read {sample}, and had been restarted before;"
                " read that sample by itself to see what kills it, use fewer workers if memory ran"
                " out, or decode in threads"
            )
        self.restarts += 1
        log.warning(
            "%s ended %s while it read %s: it is restarted, and no sample is lost; it is not"
            " restarted a second time",
            self._who,
            how,
            sample,
        )

    def _refuse(self) -> NoReturn:
        raise PassEnded(f"{self._who} was closed: it reads no more samples")

    def _end(self) -> int | None:
        """Wait for the process to end, make it end if it does not, and close its pipe; returns its
        exit code."""
        process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            return None
        with self._changing:
            self._process = self._pipe = self._area = None
            _shut(pipe)
            pipe.close()
        code = None
        hurries = (None, process.terminate, process.kill)
        for hurry, seconds in zip(hurries, END_SECONDS, strict=True):
            if hurry is not None:
                hurry()
            # One long join may not return: a process that was forked meanwhile may hold the
            # sentinel open. So its exit code is looked at every 0.1 s.
            for _ in range(int(seconds / 0.1)):
                process.join(0.1)
                if (code := process.exitcode) is not None:
                    process.close()
                    return code
        return code

    @property
    def _kind(self) -> str:
        return type(getattr(self.dataset, "probed", self.dataset)).__name__

    @property
    def _who(self) -> str:
        return f"worker process {self.name}"


def _shut(pipe: Connection) -> None:
    """Tell the child to end, even if another process has inherited our end of the pipe."""
    end = socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
    with end, suppress(OSError):  # the child may have ended already
        end.shutdown(socket.SHUT_WR)


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"with exit code {code}"
    why = {
        signal.SIGKILL: ", often the kernel's doing when memory runs out",
        signal.SIGSEGV: ", a crash in native code",
        signal.SIGBUS: ", memory or disk that ran out under a mapped file",
    }
    return f"by signal {signal.Signals(-code).name}{why.get(signal.Signals(-code), '')}"


class WorkerProcesses:
    """As many worker processes as threads read at once. A thread borrows one for a chunk, and gives
    it back when it needs the chunk's samples no longer."""

    def __init__(self, dataset: Any, start_method: StartMethod | None) -> None:
        self._dataset = dataset
        self._start_method: StartMethod | None = start_method
        self._idle: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[Fetch]:
        with self._lock:
            if not self._idle:
                name = f"perfect-worker-{len(self._all)}"
                self._idle.append(WorkerProcess(self._dataset, self._start_method, name))
                self._all += self._idle
            process = self._idle.pop()
        try:
            yield process.read
        finally:
            with self._lock:
                self._idle.append(process)

    def close(self) -> None:
        with self._lock:
            workers, self._all, self._idle = self._all, [], []
        for process in workers:
            process.stop()  # all are told first, so that they end at the same time
        for process in workers:
            process.close()
