"""The code that runs in a worker process, and its messages to `processes.WorkerProcess`.

    request   pickled `Request`, then, where the parent's staging area is new, its descriptor
    reply     pickled `Reply`, then, where the child's staging area is new, its descriptor

Before the first request there is a reply that the data set is rebuilt, and another one that the
user's `Workers.init` has run, if there is one.
"""

import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from loaders.errors import LoaderError
from loaders.pixels.jpegs import DecodeCounts
from loaders.slots.leaves import Sample, copy_sample
from loaders.sources.datasets import counts_of
from loaders.torch_seams import set_worker_info
from loaders.workers.dataset_reads import DrawWatch, read_at_once
from loaders.workers.staging import IDLE, PackedRows, RowsBeingWritten, Staging, mapped, unpack

LOOK_SECONDS = 1.0  # the time between two looks whether the parent is still there
MOST_TRACE = 20_000  # so many letters of a traceback are sent

Change = Callable[[Sample, int], Sample]
"""Changes a sample, with random numbers that its key seeds."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that is sent to the parent, pickled if that is possible."""

    pickled: bytes | None
    text: str
    trace: str

    @classmethod
    def from_error(cls, error: BaseException) -> "Failure":
        trace = error.__traceback__ and error.__traceback__.tb_next  # without our own frame
        lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        if (more := len(lines) - MOST_TRACE) > 0:
            half = MOST_TRACE // 2
            lines = f"{lines[:half]}\n... {more} letters are left out ...\n{lines[-half:]}"
        text = f"{type(error).__name__}: {error}"
        try:
            pickled = pickle.dumps(error)
        except Exception as reason:
            text, pickled = f"{text} (it could not be sent as it was: {reason})", None
        return cls(pickled, text, lines)

    def error(self, worker: str) -> BaseException:
        """The original exception, if it can be rebuilt; else a LoaderError with the same text."""
        error: BaseException = LoaderError(self.text)
        if self.pickled is not None:
            try:
                rebuilt = pickle.loads(self.pickled)
            except Exception as reason:
                # Often its __init__ takes other arguments than those it gave to the base class.
                error.add_note(f"it could not be rebuilt as it was: {reason}")
            else:
                error = rebuilt if isinstance(rebuilt, BaseException) else error
        error.add_note(f"in {worker}:\n{self.trace}")
        return error


@dataclass(frozen=True, slots=True)
class Request:
    """What the parent asks for: to read the samples `ids`, or to change samples that it has."""

    ids: list[int]
    keys: list[int]
    """The seed of each sample's random numbers."""
    samples: list[bytes] | None = None
    """The samples to change, with `Staged` in place of arrays. None: they are read."""
    area_bytes: int = 0
    """The size of the parent's staging area, if it is new or grew: then its descriptor follows."""
    frozen: bool = False
    """Whether a read that draws random numbers is refused."""
    change: bytes = b""
    """The pickled function (sample, key) -> sample that changes them, if the child lacks it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the child answers when it has rebuilt the data set, and to each request."""

    rows: PackedRows | None
    """The first of them, as far as they are alike."""
    samples: list[bytes]
    """The others up to the first unreadable one, with `Staged` in place of arrays."""
    failure: Failure | None
    area_bytes: int
    """The size of the staging area, if it is new or grew: then its descriptor follows. Else 0."""
    counts: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    """What each source has decoded since the last reply, and how."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which of the worker processes of a loader this is, and what it does before it reads."""

    number: int = 0
    workers: int = 1
    seed: int = 0
    """The loader's seed."""
    init: Callable[[int], object] | None = None
    """The user's `Workers.init`."""
    singly: bool = False
    """Whether samples are never read several at once."""

    def take(self, dataset: Any) -> None:
        """Be this worker: say so to whoever asks torch."""
        seed = self.seed + self.number
        probed = getattr(dataset, "probed", dataset)  # what `ProbedReads` reads
        set_worker_info(self.number, self.workers, seed, probed)

    def call_init(self) -> None:
        """Call the user's function under generators that are seeded as a DataLoader's are."""
        assert self.init is not None
        seed = self.seed + self.number
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        self.init(self.number)


def work(pipe: Connection, inherited: tuple[Connection, Any, WorkerPlace] | None) -> None:
    """Run a worker process until the pipe closes or the parent is gone. A forked process has
    `inherited` the parent's end of the pipe, the data set and its place."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what a Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its parent's handler
    torch.set_num_threads(1)
    parent, answers = os.getppid(), Answers(pipe)
    try:
        if inherited is None:
            payload = pipe.recv_bytes()
            try:
                dataset = pickle.loads(payload)
                place: WorkerPlace = pickle.loads(pipe.recv_bytes())
            except Exception as error:
                answers.send(failure=Failure.from_error(error))
                return
            del payload
        else:
            theirs, dataset, place = inherited
            theirs.close()  # while it is open here, the pipe would never close
        place.take(dataset)
        answers.send()
        if place.init is not None:
            try:
                place.call_init()
            except BaseException as error:
                answers.send(failure=Failure.from_error(error))
                return
            answers.send()
        answers.counts = counts_of(dataset)
        reads, changes = SeededReads(dataset, place.singly), SampleChanges()
        while True:
            while not pipe.poll(LOOK_SECONDS):
                if os.getppid() != parent:
                    raise EOFError
            request: Request = pickle.loads(pipe.recv_bytes())
            if request.samples is None:
                answers.read(request, reads)
                continue
            if request.area_bytes:
                changes.area = mapped(pipe, request.area_bytes)
            answers.send(*answers.make(request, changes.change_sample))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # this ends the process even if a thread of the data set still runs


class SeededReads:
    """Reads samples. With keys, the random numbers of a sample depend on its key alone."""

    def __init__(self, dataset: Any, singly: bool) -> None:
        """`singly`: whether samples are never read at once, because each has a time limit."""
        self._dataset = dataset
        self._many = None if singly else getattr(dataset, "__getitems__", None)
        self._together: list[Sample] | None = None
        """The samples of this request, if they were read at once."""
        self._watch = DrawWatch(dataset)
        self._seeds = False
        """Whether some sample drew, so that each is read with generators that its key seeds."""

    def begin(self, request: Request) -> None:
        self._together = None
        if not self._seeds:
            self._watch.mark()
            self._together = read_at_once(self._many, request.ids)

    def must_read_again(self, request: Request) -> bool:
        """Whether these samples drew from generators that were not seeded for each."""
        if self._seeds or not request.keys or not self._watch.moved:
            return False
        self._seeds, self._together = True, None
        return True

    def read_sample(self, request: Request, number: int) -> Sample:
        if self._together is not None:
            return self._together[number]
        if self._seeds and request.keys:
            if request.frozen:
                self._watch.refuse_draws(request.ids[number : number + 1])
            self._watch.generators.seed(request.keys[number])
        return self._dataset[request.ids[number]]


class SampleChanges:
    """Changes samples that the parent sends."""

    def __init__(self) -> None:
        self.area: mmap | None = None
        """The parent's staging area."""
        self._change: Change | None = None

    def change_sample(self, request: Request, number: int) -> Sample:
        if request.change and number == 0:
            self._change = pickle.loads(request.change)
        assert self._change is not None and self.area is not None and request.samples is not None
        # A user's function gets a sample of its own, in which pictures of Pillow are such again.
        sample = copy_sample(unpack(request.samples[number], self.area))
        return self._change(sample, request.keys[number])


class Answers:
    """What one worker process answers, through its pipe and its staging area."""

    def __init__(self, pipe: Connection) -> None:
        self.counts: Sequence[DecodeCounts] = ()
        """Those of the data set's sources."""
        self._pipe = pipe
        self._staging = Staging()

    def read(self, request: Request, reads: SeededReads) -> None:
        self._staging.begin()
        try:
            reads.begin(request)
        except LoaderError as error:
            return self.send(failure=Failure.from_error(error))
        made = self.make(request, reads.read_sample)
        if reads.must_read_again(request):
            made = self.make(request, reads.read_sample)
        self.send(*made)

    def make(
        self, request: Request, sample_of: Callable[[Request, int], Sample]
    ) -> tuple[PackedRows | None, list[bytes], Failure | None]:
        """The samples up to the first that cannot be made, and why it cannot."""
        staging = self._staging
        rows: RowsBeingWritten | None = None
        samples: list[bytes] = []
        failure: Failure | None = None
        staging.begin()
        for number, sample_id in enumerate(request.ids):
            if self._pipe.poll():
                raise EOFError  # the parent sends nothing before an answer: it has closed the pipe
            staging.note(number)
            try:
                sample = sample_of(request, number)
                if number == 0 and len(request.ids) > 1 and RowsBeingWritten.suit(sample):
                    rows = RowsBeingWritten(staging, sample, len(request.ids))
                if rows is None or samples or not rows.put(sample):
                    samples.append(staging.pack(sample, sample_id))
            except BaseException as error:
                failure = Failure.from_error(error)
                break
        staging.note(IDLE)
        return rows.packed() if rows and rows.count else None, samples, failure

    def send(
        self,
        rows: PackedRows | None = None,
        samples: Sequence[bytes] = (),
        failure: Failure | None = None,
    ) -> None:
        grown, taken = self._staging.grown_bytes, [each.take_all() for each in self.counts]
        self._pipe.send_bytes(pickle.dumps(Reply(rows, [*samples], failure, grown, taken)))
        if grown:
            self._staging.send(self._pipe, os.getppid())
