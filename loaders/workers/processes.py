"""Worker processes read samples where a data set's `__getitem__` holds the GIL.

    pool thread --- ids of a chunk --------------------------------> `worker.work` in the child
                <-- pipe: nest, numbers, words; where arrays lie ---     dataset[id], one by one
    slots <-------- views, no copy -- | staging area | <----------------- arrays (pixels)

No sample is lost or served twice: a chunk is answered up to its first failure, and asked for again
when its process died, which may happen once. One that hangs at a sample for longer than `timeout`
is killed and replaced, however often. The child ends when the pipe closes or its parent is gone,
and ignores Ctrl-C. Where the platform forks, it is forked before our threads run (`start`); `spawn`
and `forkserver` need a data set that can be pickled and a script that can be imported.
"""

import atexit
import logging
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import mmap
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NoReturn, cast

from loaders.closing import ClosedAtEnd
from loaders.errors import PassEnded, SampleTimeout, SourceError, WorkerDied
from loaders.slots.leaves import Chunk, Sample
from loaders.sources.datasets import counts_of
from loaders.workers import fork_server, worker
from loaders.workers.reading_thread import describe_exit, sample_timeout
from loaders.workers.staging import IDLE, PROGRESS, Staging, mapped, unpack
from loaders.workers.worker import Reply, Request, WorkerPlace

log = logging.getLogger(__name__)

StartMethod = Literal["fork", "spawn", "forkserver"]

LOOK_SECONDS = 1.0  # the time between two looks whether the child is still there
LOOKS = 8  # so many looks in the time that a sample may take, where that is shorter
END_SECONDS = (5.0, 1.0, 5.0)  # the time to end: by itself, after SIGTERM, after SIGKILL

GUARDED = "keep its actions under `if __name__ == '__main__':`"
NOT_PICKLED = (
    "open files, locks and lambdas cannot be pickled: open them in __getitem__, leave them out in"
    " __getstate__, or decode in threads"
)
NOT_IMPORTED = 'define it in a module that can be imported, or give start_method="fork"'


class _ProcessLost(Exception):
    """The process at the other end is dead or dying."""


class _ReadTimeout(Exception):
    """The process at the other end has been at a sample of the chunk for too long."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        """The sample's number in the chunk."""


def default_start_method() -> StartMethod:
    """How a DataLoader starts its workers here: what the program has set, else the platform's."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return cast(StartMethod, chosen or multiprocessing.get_all_start_methods()[0])


class WorkerProcess(ClosedAtEnd):
    """A process that reads samples of `dataset`, from the first `read` on. It may die once."""

    def __init__(
        self,
        dataset: Any,
        start_method: StartMethod | None,
        name: str,
        timeout: float | None = None,
        place: WorkerPlace | None = None,
    ) -> None:
        """A sample may take `timeout` seconds; None: as long as it takes."""
        self.dataset = dataset
        self.start_method: StartMethod = start_method or default_start_method()
        self.name = name
        self._who = f"worker process {name}"
        self.timeout = timeout
        self.place = place or WorkerPlace()
        self.restarts = 0
        self._parent = os.getpid()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._area: mmap | None = None
        self._outbox: Staging | None = None
        self._change = b""
        self._stopping = False
        self._reading = threading.Lock()  # held while somebody uses the pipe
        self._changing = threading.Lock()  # held while the pipe is replaced or shut

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def read(self, ids: Sequence[int], keys: Sequence[int] = (), frozen: bool = False) -> Chunk:
        """Read samples, with the generators seeded by their keys, if there are some. `frozen`: a
        read that draws is refused. Arrays are tensors over the staging area: copy them before the
        next `read`. PIL pictures become `Picture`s."""
        numbers, seeds = [int(i) for i in ids], [int(key) for key in keys]
        hung = None
        with self._reading:
            while hung is None or numbers:
                request = Request(numbers, seeds, frozen=frozen)
                try:
                    chunk = self._answered(numbers, lambda pipe, r=request: self._send(pipe, r))
                    return chunk if hung is None or chunk.error else Chunk(chunk.samples, hung)
                except _ReadTimeout as error:
                    # What the process had read before is lost with it, and is read again.
                    hung = self._too_long("read", numbers[error.number])
                    numbers, seeds = numbers[: error.number], seeds[: error.number]
        return Chunk([], hung)

    def change(
        self, change: bytes, samples: Sequence[Sample], ids: Sequence[int], keys: Sequence[int]
    ) -> Chunk:
        """Change samples by the pickled function `change`, (sample, key) -> sample."""
        numbers = [int(i) for i in ids]

        def send(pipe: Connection) -> None:
            outbox = self._outbox = self._outbox or Staging()
            outbox.begin()
            packed = [outbox.pack(*each) for each in zip(samples, numbers, strict=True)]
            news = b"" if change == self._change else change
            request = Request(numbers, [*keys], packed, outbox.grown_bytes, change=news)
            self._send(pipe, request, outbox)
            self._change = change

        with self._reading:
            try:
                chunk = self._answered(numbers, send)
            except _ReadTimeout as error:
                raise self._too_long("augment", numbers[error.number]) from None
            if chunk.error is not None:
                self._change = b""  # it may be the function that could not be rebuilt there
            return chunk

    def start(self) -> None:
        """Start the process now, if that is done by forking."""
        with self._reading:
            if self._pipe is None and self.start_method == "fork":
                self._start()

    def stop(self) -> None:
        """Tell the process to end after its current sample. Any thread may call this."""
        if os.getpid() != self._parent:
            return  # this is a fork of the parent, and the process is not its own
        with self._changing:
            self._stopping = True
            if self._pipe is not None:
                _shut(self._pipe)

    def close(self) -> None:
        """End the process, by force if need be. Any thread may call this, and call it again."""
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

    def _answered(self, ids: list[int], send: Callable[[Connection], None]) -> Chunk:
        """Send a request, and wait for its answer; once more if the process died."""
        try:
            while True:
                try:
                    send(self._pipe or self._start())
                    return self._received()
                except _ProcessLost:
                    self._restart(ids)
        except _ReadTimeout:
            assert self._process is not None
            self._process.kill()
            self._end()
            raise
        except BaseException:
            self._end()  # after a Ctrl-C, an answer under way would be taken for the next one
            raise

    def _too_long(self, doing: str, sample_id: int) -> SampleTimeout:
        log.warning(
            "%s was killed, because it had tried to %s sample %d for longer than timeout=%g"
            " seconds; another process takes its place",
            self._who,
            doing,
            sample_id,
            self.timeout,
        )
        return sample_timeout(doing, sample_id, self.timeout or 0)

    def _send(self, pipe: Connection, request: Request, outbox: Staging | None = None) -> None:
        try:
            pipe.send_bytes(pickle.dumps(request))
            if outbox is not None and request.area_bytes:
                outbox.send(pipe, self.pid or 0)
        except OSError as error:
            raise _ProcessLost from error

    def _received(self) -> Chunk:
        assert self._pipe is not None
        reply, area = self._receive(self._pipe), self._area
        for mine, more in zip(counts_of(self.dataset), reply.counts, strict=True):
            mine.merge(more)
        assert area is not None
        samples = [unpack(sample, area) for sample in reply.samples]
        if reply.rows is not None:
            rows = reply.rows.unpacked(area)
            samples = [*rows, *samples] if samples else rows
        return Chunk(samples, reply.failure.error(self._who) if reply.failure else None)

    def _start(self) -> Connection:
        context = cast(SpawnContext, multiprocessing.get_context(self.start_method))
        forked = self.start_method == "fork"
        payloads = []
        if not forked:
            whole, init = f"the data set ({self._kind})", f"init={self.place.init!r}"
            payloads.append(self._pickled(self.dataset, whole, NOT_PICKLED))
            payloads.append(self._pickled(self.place, init, NOT_IMPORTED))
        if self.start_method == "forkserver":
            fork_server.prepare(worker.__name__)  # it imports torch once
        ours, theirs = context.Pipe()
        inherited = (ours, self.dataset, self.place) if forked else None
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
            for payload in payloads:
                ours.send_bytes(payload)
            reply = self._receive(ours)
            init = None
            if reply.failure is None and self.place.init is not None:
                init = self._receive(ours).failure
        except (OSError, _ProcessLost) as error:
            how = describe_exit(self._end())
            if self._stopping:
                self._refuse()
            guard = "" if forked else f". {self.start_method!r} imports the script: {GUARDED}"
            raise WorkerDied(
                f"{self._who} ended {how} before it could read a sample; see what it wrote to"
                f" stderr{guard}"
            ) from error
        if reply.failure is not None:
            self._end()
            error = reply.failure.error(self._who)
            raise SourceError(
                f"the data set ({self._kind}) cannot be rebuilt in a process of its own: {error};"
                " define its class in a module that can be imported, or decode in threads"
            ) from error
        if init is not None:
            self._end()
            error = init.error(self._who)
            error.add_note(f"while init was called with {self.place.number}")
            raise error
        return ours

    def _pickled(self, sent: Any, what: str, remedy: str) -> bytes:
        try:
            return pickle.dumps(sent, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise SourceError(
                f"{what} cannot be sent to a process of its own: {error}; {remedy}"
            ) from error

    def _receive(self, pipe: Connection) -> Reply:
        process = self._process
        assert process is not None
        look = min(LOOK_SECONDS, (self.timeout or LOOK_SECONDS) / LOOKS)
        at, since = IDLE, time.monotonic()
        try:
            # Waiting for the pipe alone may not end: a process that was forked meanwhile may hold
            # its other end open.
            while not connection.wait([pipe, process.sentinel], look):
                if process.exitcode is not None:
                    break
                if (seen := self._current_sample()) != at:
                    at, since = seen, time.monotonic()
                elif at != IDLE and time.monotonic() - since > (self.timeout or float("inf")):
                    raise _ReadTimeout(at)
            if not pipe.poll():
                raise _ProcessLost
            reply: Reply = pickle.loads(pipe.recv_bytes())
            if reply.area_bytes:
                self._area = mapped(pipe, reply.area_bytes)
        except (OSError, EOFError) as error:
            raise _ProcessLost from error
        return reply

    def _current_sample(self) -> int:
        """The number of the sample that the process is at."""
        return PROGRESS.unpack_from(self._area)[0] if self._area is not None else IDLE

    def _restart(self, ids: list[int]) -> None:
        at = self._current_sample()
        how = describe_exit(self._end())
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
        """Make the process end, and close its pipe; returns its exit code."""
        process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            return None
        with self._changing:
            self._process = self._pipe = self._area = None
            outbox, self._outbox, self._change = self._outbox, None, b""
            if outbox is not None:
                outbox.close()
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


def _shut(pipe: Connection) -> None:
    """Tell the child to end, even if another process has inherited our end of the pipe."""
    end = socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
    with end, suppress(OSError):  # the child may have ended already
        end.shutdown(socket.SHUT_WR)
