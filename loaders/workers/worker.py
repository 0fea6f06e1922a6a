"""The code that runs in a worker process, and its messages to `processes.WorkerProcess`.

    request   pickled ids
    reply     pickled `Reply`, then, where the staging area grew, its descriptor
    staging   | which of the chunk is being read | picture | picture | ... |   it only ever grows

The staging area is a nameless file in memory. So no kill leaves anything behind in /dev/shm, and a
container's small /dev/shm does not limit it. It holds the arrays of one chunk, each in the layout
that it had (a channels_last picture stays so). The next chunk overwrites them.
"""

import os
import pickle
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from mmap import mmap
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from PIL import Image

from loaders.errors import LoaderError
from loaders.slots.leaves import Picture, Sample, as_kind, as_tensor, kind_of, mode_of
from loaders.sources.randomness import SeededGenerators, generators_of

LOOK_SECONDS = 1.0  # the time between two looks whether the parent is still there
FIRST_BYTES = 1 << 16
ALIGNMENT = 64
PROGRESS = struct.Struct("q")
IDLE = -1


@dataclass(frozen=True, slots=True)
class Staged:
    """An array leaf in the staging area: where it lies, and how its memory is arranged."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    """The size of each dimension, from the outermost in memory to the innermost."""
    back: tuple[int, ...]
    """The place of each dimension of the leaf among `sizes`."""
    start: int
    mode: str | None
    """The mode of the PIL picture that it was. None: it was another kind of array."""
    kind: type[torch.Tensor] | None = None
    """The subclass of torch.Tensor that it is, and its attributes. None: it is none."""
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])

    def view(self, area: mmap) -> torch.Tensor:
        """The leaf as a tensor over the area, without a copy. It keeps the area mapped, and its
        values change with the next chunk."""
        count = int(np.prod(self.sizes, dtype=np.int64))
        if count:
            memory = torch.frombuffer(area, dtype=self.dtype, count=count, offset=self.start)
        else:
            memory = torch.empty(0, dtype=self.dtype)
        leaf = memory.view(self.sizes).permute(self.back)
        if self.mode is not None:
            leaf = leaf.as_subclass(Picture)
            leaf.picture_mode = self.mode
        return as_kind(leaf, self.kind, self.attributes)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that is sent to the parent, pickled if that is possible."""

    pickled: bytes | None
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        trace = error.__traceback__ and error.__traceback__.tb_next  # without our own frame
        lines = traceback.format_exception(type(error), error, trace)
        text = f"{type(error).__name__}: {error}"
        try:
            pickled = pickle.dumps(error)
        except Exception as reason:
            text, pickled = f"{text} (it could not be sent as it was: {reason})", None
        return cls(pickled, text, "".join(lines).rstrip())

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
class Reply:
    """What the child answers when it has rebuilt the data set, and to each request."""

    samples: list[bytes]
    """The samples up to the first unreadable one, with `Staged` in place of arrays."""
    failure: Failure | None
    area_bytes: int
    """The size of the staging area, if it is new or grew: then its descriptor follows. Else 0."""


class Staging:
    """The staging area as the child sees it, which writes to it."""

    def __init__(self) -> None:
        self._file = _nameless_file()
        self._end = 0
        self._told = 0
        self.area = self._grow(FIRST_BYTES)
        self.begin()

    def begin(self) -> None:
        """Begin a new chunk, whose arrays overwrite those of the chunk before."""
        self._end = PROGRESS.size
        self.note(IDLE)

    def note(self, number: int) -> None:
        """Note which sample of the chunk is being read. If that kills the process, the parent can
        name the sample."""
        PROGRESS.pack_into(self.area, 0, number)

    def place(self, leaf: Any) -> Any:
        """Copy a leaf into the area if it is an array. Any other leaf is returned as it is."""
        array = isinstance(leaf, torch.Tensor | np.ndarray | Image.Image)
        value = as_tensor(leaf) if array else None
        if not isinstance(value, torch.Tensor):
            return leaf
        outer_first = sorted(range(value.ndim), key=lambda d: -value.stride(d))
        staged = Staged(
            value.dtype,
            tuple(value.shape[d] for d in outer_first),
            tuple(outer_first.index(d) for d in range(value.ndim)),
            -(-self._end // ALIGNMENT) * ALIGNMENT,
            mode_of(leaf),
        )
        kind = kind_of(leaf)
        self._end = staged.start + value.numel() * value.element_size()
        if self._end > len(self.area):
            self.area = self._grow(max(self._end, 2 * len(self.area)))
        staged.view(self.area).copy_(value)
        return staged if kind is None else replace(staged, kind=kind, attributes={**vars(leaf)})

    def send(self, pipe: Connection, samples: list[bytes], failure: Failure | None) -> None:
        grown = self._told != len(self.area)
        self._told = len(self.area)
        pipe.send_bytes(pickle.dumps(Reply(samples, failure, self._told if grown else 0)))
        if grown:
            reduction.send_handle(pipe, self._file, os.getppid())

    def _grow(self, size: int) -> mmap:
        os.ftruncate(self._file, size)
        return mmap(self._file, size)


def work(pipe: Connection, inherited: tuple[Connection, Any] | None) -> None:
    """Run a worker process until the pipe closes or the parent is gone. A forked process has
    `inherited` the parent's end of the pipe and the data set."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what a Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its parent's handler
    torch.set_num_threads(1)
    parent, staging = os.getppid(), Staging()
    try:
        if inherited is None:
            payload = pipe.recv_bytes()
            try:
                dataset = pickle.loads(payload)
            except Exception as error:
                staging.send(pipe, [], Failure.of(error))
                return
            del payload
        else:
            theirs, dataset = inherited
            theirs.close()  # while it is open here, the pipe would never close
        staging.send(pipe, [], None)
        generators = SeededGenerators(generators_of(dataset))
        while True:
            while not pipe.poll(LOOK_SECONDS):
                if os.getppid() != parent:
                    raise EOFError
            ids, keys = pickle.loads(pipe.recv_bytes())
            _answer(pipe, SeededReads(dataset, generators, ids, keys), staging)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # this ends the process even if a thread of the data set still runs


@dataclass(frozen=True, slots=True)
class SeededReads:
    """What a request asks for. With keys, the random numbers of a sample depend on its key alone,
    and not on the process and on what that has read before."""

    dataset: Any
    generators: SeededGenerators
    ids: list[int]
    keys: list[int]

    def read(self, number: int) -> Sample:
        if self.keys:
            self.generators.seed(self.keys[number])
        return self.dataset[self.ids[number]]


def _answer(pipe: Connection, wanted: SeededReads, staging: Staging) -> None:
    samples: list[bytes] = []
    failure: Failure | None = None
    staging.begin()
    for number, sample_id in enumerate(wanted.ids):
        if pipe.poll():
            raise EOFError  # the parent sends nothing before an answer, so it has closed the pipe
        staging.note(number)
        try:
            samples.append(_pack(wanted.read(number), sample_id, staging))
        except BaseException as error:
            failure = Failure.of(error)
            break
    staging.note(IDLE)
    staging.send(pipe, samples, failure)


def _pack(sample: Sample, sample_id: int, staging: Staging) -> bytes:
    nest = change_leaves(sample, staging.place)
    try:
        return pickle.dumps(nest, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise LoaderError(
            f"sample {sample_id} holds something that cannot leave its process: {error}; return"
            " tensors, arrays, pictures, numbers and strings, or decode in threads"
        ) from error


def change_leaves(sample: Sample, change: Callable[[Any], Any]) -> Sample:
    """The same nest of tuples, lists and dicts, with every leaf replaced by `change(leaf)`."""
    if isinstance(sample, dict):
        return {key: change_leaves(part, change) for key, part in sample.items()}
    if not isinstance(sample, tuple | list):
        return change(sample)
    parts = [change_leaves(part, change) for part in sample]
    if hasattr(sample, "_fields"):
        return type(sample)(*parts)
    return tuple(parts) if isinstance(sample, tuple) else parts


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("perfect-staging")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
