"""What a user asks a loader for. Unknown words, wrong numbers and useless arguments are refused.

`LoaderOptions` holds `OrderOptions`, `Workers`, `Device`, `Cache`, and all else that stays the same
while a loader lives. `SettledWorkers` says how many workers of which kind a data set gets.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch

from loaders.adopting.adoption import safe_in_threads, why_not_sendable
from loaders.backends import BACKENDS, Backend
from loaders.batching.batches import Augments, Collate, each_view
from loaders.batching.joint_parts import PartKinds
from loaders.batching.user_views import WholeSample
from loaders.cache.disk_cache import Cache
from loaders.errors import check_at_least_one, check_has_effect, check_word
from loaders.order.reuse import MODES, Mode
from loaders.pixels.augmentation import Augmentation
from loaders.pixels.moves import PART_KINDS
from loaders.streams.streamed_samples import StreamedSamples
from loaders.workers.machine import usable_cpus
from loaders.workers.processes import StartMethod, WorkerProcess, default_start_method
from loaders.workers.reader import OnError
from loaders.workers.reading_thread import ReadingThread
from loaders.workers.worker import WorkerPlace

WorkerKind = Literal["auto", "thread", "process"]


@dataclass(frozen=True, slots=True)
class Workers:
    """Who reads samples: `Workers(4, "process", timeout=60)`."""

    count: int | Literal["auto"] = "auto"
    """"auto": the CPUs that this rank may use. 0: the loop's own thread reads, nothing ahead."""
    kind: WorkerKind = "auto"
    """"auto": threads, if the data set is known to be safe in them; else processes."""
    start_method: StartMethod | None = None
    """How processes start. None: as those of a DataLoader."""
    timeout: float | None = None
    """Seconds that a sample may take. None: as long as it takes."""
    init: Callable[[int], object] | None = None
    """Called in each worker process with its number, before it reads."""

    def __post_init__(self) -> None:
        check_word("kind", self.kind, get_args(WorkerKind))
        if self.start_method is not None:
            check_word("start_method", self.start_method, get_args(StartMethod))
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, not {self.timeout}")
        if self.count != "auto" and not (isinstance(self.count, int) and self.count >= 0):
            raise ValueError(
                f'workers must be a whole number from 0 on, or "auto", not {self.count!r}'
            )
        if self.count == 0:
            check_has_effect("timeout", self.timeout, "workers")
            if self.kind == "process":
                raise ValueError('kind="process" has no effect with workers=0: leave it out')
        if self.count == 0 or self.kind == "thread":
            for name in ("start_method", "init"):
                check_has_effect(name, getattr(self, name), 'workers of kind="process"')

    def changed_by(self, given: "int | Literal['auto'] | Workers") -> "Workers":
        """These, but for what `given` says: a number, or each value that is not the default."""
        if not isinstance(given, Workers):
            return replace(self, count=given)
        values = {each.name: getattr(given, each.name) for each in fields(Workers)}
        return replace(self, **{k: v for k, v in values.items() if v != getattr(Workers(), k)})


@dataclass(frozen=True, slots=True)
class Device:
    """Where batches go while the step before runs."""

    to: torch.device | str
    augments: bool = False
    """Whether a batched `augment` runs there, and not in the workers."""


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """In which order samples are served, and how many of them the buffer mixes."""

    mode: Mode
    shuffle: bool
    drop_last: bool
    sampler: Any
    buffer_batches: int
    buffer_bytes: int | None

    def __post_init__(self) -> None:
        check_word("mode", self.mode, MODES)
        check_at_least_one("buffer_batches", self.buffer_batches)


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """What stays the same while a loader lives."""

    order: OrderOptions
    backend: Backend
    once: Augmentation | None
    on_error: OnError
    workers: Workers
    cache: Cache | None
    augment: Augments | None
    collate: Collate | None
    device: Device | None
    pin_memory: bool
    parts: PartKinds | None
    """What goes with the picture, and how."""

    def __post_init__(self) -> None:
        check_word("backend", self.backend, BACKENDS)
        check_word("on_error", self.on_error, get_args(OnError))
        if self.backend != "native" and self.workers.timeout is not None:
            raise ValueError(
                f"timeout has no effect with backend={self.backend!r}, which reads many samples at"
                " once: leave it out"
            )
        if self.cache is not None and not isinstance(self.cache, Cache):
            raise TypeError(
                f'cache must be a Cache, such as Cache("ram", limit_bytes=2 << 30), not'
                f" {self.cache!r}"
            )
        if isinstance(self.augment, list | tuple) and not self.augment:
            raise ValueError("augment is an empty list: list an augmentation for each view")
        whole = [isinstance(each, WholeSample) for each in each_view(self.augment)]
        if any(whole) and not all(whole):
            raise ValueError(
                "augment lists a WholeSample beside others, which make views of the picture alone:"
                " make all of them a WholeSample, or none"
            )
        if any(whole) and self.parts is not None:
            raise ValueError("parts has no effect on a WholeSample, which moves all: leave it out")
        for name, kind in (self.parts or {}).items():
            check_word(f"parts[{name!r}]", kind, PART_KINDS)


def check_stream(options: LoaderOptions) -> None:
    """Refuse what needs samples that can be asked for by their numbers."""
    order, workers, no_process = options.order, options.workers, "no worker process reads it"
    refused = {
        "sampler": (order.sampler is not None, "a stream has an order of its own"),
        "buffer_bytes": (order.buffer_bytes is not None, "give buffer_batches instead"),
        "backend": (options.backend != "native", "leave it out"),
        "on_error": (options.on_error != "raise", "let decode= or the data set pass over it"),
        "init": (workers.init is not None, no_process),
        "start_method": (workers.start_method is not None, no_process),
        "timeout": (workers.timeout is not None, "TarShards(timeout=) is for servers"),
        'kind="process"': (workers.kind == "process", "threads decode what one of them reads"),
        "cache": (options.cache is not None, "its samples have no numbers to be found by"),
    }
    for name, (given, instead) in refused.items():
        if given:
            raise ValueError(f"{name} does not go with a stream, whose samples come one by one"
                             f" ({instead}): leave {name} out")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SettledWorkers:
    """What became of the `Workers` that were asked for."""

    asked: Workers
    count: int
    kind: WorkerKind
    because: str = ""
    """Why they are of this kind, where the loader chose it."""


def settle_workers(asked: Workers, dataset: Any) -> SettledWorkers:
    """As many workers as were asked for, of a kind that suits the data set."""
    count = usable_cpus() if asked.count == "auto" else asked.count
    if asked.kind != "auto":
        return SettledWorkers(asked, count, asked.kind)
    if isinstance(dataset, StreamedSamples) or count == 0:
        return SettledWorkers(asked, count, "thread")
    kind = type(dataset).__name__
    for name in ("init", "start_method"):
        if getattr(asked, name) is not None:
            return SettledWorkers(asked, count, "process", f"{name} is for them")
    if safe_in_threads(dataset):
        return SettledWorkers(asked, count, "thread", f"{kind} is known to be safe in them")
    if default_start_method() != "fork" and (why := why_not_sendable(dataset)):
        because = f"{kind} cannot be sent to a process ({why}), nor is it known to be safe in more"
        return SettledWorkers(asked, 1, "thread", because)
    because = f'{kind} is not known to be safe in threads; Workers(kind="thread") if it is'
    return SettledWorkers(asked, count, "process", because)


def worker_process(dataset: Any, workers: SettledWorkers, seed: int, number: int) -> WorkerProcess:
    """Worker number `number`, whose process starts with its first read."""
    asked = workers.asked
    place = WorkerPlace(number, workers.count, seed, asked.init, asked.timeout is not None)
    name = f"perfect-worker-{number}"
    return WorkerProcess(dataset, asked.start_method, name, asked.timeout, place)


def reading_thread(dataset: Any, timeout: float, number: int) -> ReadingThread:
    return ReadingThread(dataset, timeout, f"perfect-read-{number}")
