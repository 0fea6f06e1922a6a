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
import math
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnContext
from typing import Any, Literal, NoReturn, cast

from loaders.closing import ClosedAtEnd
from loaders.errors import PassEnded, SampleTimeout, SourceError, WorkerDied
from loaders.slots.leaves import Chunk, Sample
from loaders.sources.datasets import counts_of
from loaders.workers import child_process, fork_server, worker
from loaders.workers.child_process import ChildProcess, NoAnswer, ProcessLost, ReadTimeout
from loaders.workers.reading_thread import describe_exit, sample_timeout
from loaders.workers.staging import IDLE
from loaders.workers.worker import Request, WorkerPlace

log = logging.getLogger(__name__)

StartMethod = Literal["fork", "spawn", "forkserver"]

FORK_SECONDS = 60.0
"""A forked process that has not reported after so long never will. All that it does before takes
milliseconds, but where a thread held a lock at the fork, nobody lets go of it in there."""
GUARDED = "keep its actions under `if __name__ == '__main__':`"
NOT_PICKLED = (
    "open files, locks and lambdas cannot be pickled: open them in __getitem__, leave them out in"
    " __getstate__, or decode in threads"
)
NOT_IMPORTED = 'define it in a module that can be imported, or give start_method="fork"'


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
        self.timeout = timeout
        self.place = place or WorkerPlace()
        self.restarts = 0
        self._parent = os.getpid()
        self._child: ChildProcess | None = None
        self._stopping = False
        self._reading = threading.Lock()  # held while somebody uses the child
        self._changing = threading.Lock()  # held while the child is replaced or its pipe is shut

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

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
                    chunk = self._answered(numbers, lambda child, r=request: child.send(r))
                    return chunk if hung is None or chunk.error else Chunk(chunk.samples, hung)
                except ReadTimeout as error:
                    # What the process had read before is lost with it, and is read again.
                    hung = self._too_long("read", numbers[error.number])
                    numbers, seeds = numbers[: error.number], seeds[: error.number]
        return Chunk([], hung)

    def change(
        self, change: bytes, samples: Sequence[Sample], ids: Sequence[int], keys: Sequence[int]
    ) -> Chunk:
        """Change samples by the pickled function `change`, (sample, key) -> sample."""
        numbers = [int(i) for i in ids]

        def send(child: ChildProcess) -> None:
            child.send_samples(change, samples, numbers, [*keys])

        with self._reading:
            try:
                return self._answered(numbers, send)
            except ReadTimeout as error:
                raise self._too_long("augment", numbers[error.number]) from None

    def start(self) -> None:
        """Start the process now, if that is done by forking."""
        with self._reading:
            if self._child is None and self.start_method == "fork":
                self._start()

    def stop(self) -> None:
        """Tell the process to end after its current sample. Any thread may call this."""
        if os.getpid() != self._parent:
            return  # this is a fork of the parent, and the process is not its own
        with self._changing:
            self._stopping = True
            if self._child is not None:
                self._child.shut_pipe()

    def close(self) -> None:
        """End the process, by force if need be. Any thread may call this, and call it again."""
        atexit.unregister(self.stop)
        if os.getpid() != self._parent:
            return
        self.stop()
        seconds = child_process.END_SECONDS
        if not self._reading.acquire(timeout=seconds[0]):
            with self._changing:
                if self._child is not None:
                    self._child.kill()
            # The thread that reads notices the death within LOOK_SECONDS.
            if not self._reading.acquire(timeout=sum(seconds)):
                return
        try:
            self._end()
        finally:
            self._reading.release()

    # ---- under the lock of `read` ---------------------------------------------------------------

    def _answered(self, ids: list[int], send: Callable[[ChildProcess], None]) -> Chunk:
        """Send a request, and wait for its answer; once more if the process died."""
        try:
            while True:
                try:
                    child = self._child or self._start()
                    send(child)
                    reply = child.receive()
                    for mine, more in zip(counts_of(self.dataset), reply.counts, strict=True):
                        mine.merge(more)
                    error = reply.failure.error(self._who) if reply.failure else None
                    return Chunk(child.samples(reply), error)
                except ProcessLost:
                    self._restart(ids)
        except BaseException as error:
            if isinstance(error, ReadTimeout) and self._child is not None:
                self._child.kill()
            self._end()  # after a Ctrl-C, an answer under way would be taken for the next one
            raise

    def _too_long(self, doing: str, sample_id: int) -> SampleTimeout:
        error = sample_timeout(doing, sample_id, self.timeout or 0)
        log.warning("%s was killed, and another process takes its place: %s", self._who, error)
        return error

    def _start(self) -> ChildProcess:
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
            child = self._child = ChildProcess(process, ours, self.timeout)
        atexit.register(self.stop)
        try:
            for payload in payloads:
                ours.send_bytes(payload)
            reply = child.receive(FORK_SECONDS if forked else math.inf)
            init = None
            if reply.failure is None and self.place.init is not None:
                init = child.receive().failure
        except NoAnswer:
            return self._fork_again(child)
        except (OSError, ProcessLost) as error:
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
        return child

    def _fork_again(self, child: ChildProcess) -> ChildProcess:
        child.kill()
        self._end()
        if self._stopping:
            self._refuse()
        hangs = f"{self._who} hangs since it was forked: a thread of this program held a lock then"
        if self.restarts:
            raise WorkerDied(f'{hangs}; give start_method="forkserver", or decode in threads')
        self.restarts += 1
        log.warning("%s. It is forked once more", hangs)
        return self._start()

    def _pickled(self, sent: Any, what: str, remedy: str) -> bytes:
        try:
            return pickle.dumps(sent, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise SourceError(
                f"{what} cannot be sent to a process of its own: {error}; {remedy}"
            ) from error

    def _restart(self, ids: list[int]) -> None:
        at = self._child.current_sample() if self._child is not None else IDLE
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
        """Make the process end; returns its exit code."""
        with self._changing:
            child, self._child = self._child, None
            if child is not None:
                child.hang_up()
        return None if child is None else child.end()

    @property
    def _who(self) -> str:
        return f"worker process {self.name}"

    @property
    def _kind(self) -> str:
        return type(getattr(self.dataset, "probed", self.dataset)).__name__
