"""A pass in which every sample is served once and as it is read: torch's DataLoader makes it.

Samples go the way that a DataLoader's go: the same processes, worker info, collate function and
errors. The order and a resume in the middle of a pass are ours. So is what a worker process draws:
it is a function of (seed, pass, sample).
"""

import logging
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from loaders.adopting.adoption import why_not_sendable
from loaders.batching.batches import Collate
from loaders.batching.device import DeviceFeed
from loaders.errors import OTHER_ITERATOR, LoaderError, PassEnded, SourceError, WorkerDied
from loaders.order.serve import Serve
from loaders.passes.pass_run import (
    FailedBatch,
    PlannedPass,
    TakenBatch,
    other_process_error,
    send_ahead,
)
from loaders.pipeline import PipelineSetup
from loaders.pixels.augmentation import draw_keys
from loaders.slots.leaves import as_tensor, change_leaves, leaves_of
from loaders.sources.randomness import SeededGenerators, generators_of
from loaders.sources.samplers import OwnBatching
from loaders.stats import BatchInfo, LoaderStats
from loaders.streams.streamed_samples import StreamedSamples
from loaders.torch_seams import end_workers, set_worker_info, take_over_workers
from loaders.workers.decode_work import READING, WORKER_SEED
from loaders.workers.processes import default_start_method

log = logging.getLogger(__name__)

TOGETHER = 64
"""The ids of so many batches are computed at once."""


def is_served_by_torch(setup: PipelineSetup, reuse: int) -> bool:
    """Whether all that a pass needs is what a DataLoader does. (Data sets that threads may read,
    or that lie in memory, are served quicker by our own.)"""
    opened, options, workers = setup.opened, setup.options, setup.workers
    redone = opened.split is not None and opened.split.augment is not None
    return (
        reuse == 1
        and not (redone or options.augment is not None or options.once is not None)
        and options.cache is None
        and options.order.buffer_bytes is None
        and options.on_error == "raise"
        and options.backend == "native"
        and (opened.decoded is None or options.workers.init is not None)
        and not isinstance(opened.dataset, StreamedSamples)
        and options.workers.timeout is None
        and (workers.kind == "process" or workers.count == 0)
    )


@dataclass(frozen=True, slots=True)
class AskedBatch:
    """The samples of one batch, as a worker is asked for them."""

    pass_index: int
    ids: NDArray[np.int64]
    serves: NDArray[np.int64]
    """What their random numbers are drawn for, beside the pass and the id."""


class TorchReads:
    """What a DataLoader takes for its data set. An item is a whole batch, collated."""

    def __init__(self, setup: PipelineSetup) -> None:
        self._dataset = setup.opened.dataset
        self._collate: Collate = setup.options.collate or _collated
        self._seed = setup.seed
        self._init = setup.options.workers.init
        self._generators: SeededGenerators | None = None
        self._state: list[tuple[str, bytes]] | None = None
        """The state of the generators after the last batch. None: some sample drew, so that each is
        read with generators that its key seeds."""

    def begin_worker(self, number: int) -> None:
        """Be a DataLoader's worker: what asks torch is told of the user's data set."""
        info = get_worker_info()
        assert info is not None, "torch calls it in a worker"
        set_worker_info(number, info.num_workers, info.seed, self._dataset)
        if self._init is not None:
            try:
                self._init(number)
            except Exception as error:
                error.add_note(f"while init was called with {number}")
                raise
        self._generators = SeededGenerators(generators_of((self._dataset, self._collate)))
        self._state = self._generators.digests()

    def __getitems__(self, asked: AskedBatch) -> tuple[Any, float]:
        """The batch, and the seconds that it took."""
        begun = time.perf_counter()
        batch = self._batch(asked)
        return batch, time.perf_counter() - begun

    def _batch(self, asked: AskedBatch) -> Any:
        ids, generators = asked.ids.tolist(), self._generators
        if generators is None:  # the loop itself reads: it draws as it does with a DataLoader
            return self._collate(self._read(ids))
        if self._state is not None:
            batch = self._collate(self._read(ids))
            before, self._state = self._state, generators.digests()
            if self._state == before:
                return batch
            self._state = None
        keys = draw_keys(self._seed, asked.pass_index, asked.ids, asked.serves).tolist()
        samples: list[Any] = []
        for sample_id, key in zip(ids, keys, strict=True):
            generators.seed(key)
            samples.append(self._read_sample(sample_id))
        generators.seed(keys[0])
        return self._collate(samples)

    def _read(self, ids: list[int]) -> Any:
        many = getattr(self._dataset, "__getitems__", None)
        return [self._read_sample(sample_id) for sample_id in ids] if many is None else many(ids)

    def _read_sample(self, sample_id: int) -> Any:
        try:
            return self._dataset[sample_id]
        except Exception as error:
            error.add_note(f"while reading sample {sample_id}")
            raise


class AskedSampler:
    """A DataLoader's sampler, or batch sampler. It holds no more, or both would hold each other."""

    def __init__(self) -> None:
        self.asked: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.asked


class TorchBatches:
    """The DataLoader of one loader. Its workers stay from pass to pass."""

    def __init__(self) -> None:
        self._loader: DataLoader[Any] | None = None
        self._pid = 0
        self._of_the_parent: DataLoader[Any] | None = None
        """What a forked process has inherited. If collected, it would end the parent's workers."""
        self._sampler = AskedSampler()

    def begin(self, setup: PipelineSetup, seed: int, asked: Iterator[Any]) -> Iterator[Any]:
        """The batches of a pass. `seed` is that of the workers that start with it."""
        self._sampler.asked = asked
        if self._loader is None or self._pid != os.getpid():
            self._of_the_parent = self._loader
            self._loader, self._pid = self._make_loader(setup), os.getpid()
        assert self._loader.generator is not None
        self._loader.generator.manual_seed(seed)
        return take_over_workers(iter(self._loader))

    def _make_loader(self, setup: PipelineSetup) -> DataLoader[Any]:
        options, count = setup.options, setup.workers.count
        dataset: Any = setup.opened.dataset
        if count and (options.workers.start_method or default_start_method()) != "fork":
            _check_sendable(setup)
        batching = options.order.sampler
        init: Any = options.workers.init
        if isinstance(batching, OwnBatching):
            how = {"collate_fn": options.collate, **batching.arguments(self._sampler)}
        else:
            dataset = reads = TorchReads(setup)
            how = {"collate_fn": _as_it_is, "batch_sampler": self._sampler}
            init = reads.begin_worker
        with warnings.catch_warnings():  # the user's own DataLoader warned of too many workers
            warnings.filterwarnings("ignore", "This DataLoader will create")
            return DataLoader(
                dataset,
                **how,
                num_workers=count,
                pin_memory=options.pin_memory and torch.cuda.is_available(),
                timeout=options.workers.timeout or 0,
                worker_init_fn=init,
                multiprocessing_context=options.workers.start_method if count else None,
                generator=torch.Generator(),
                # What a stream is in this process, a worker has from its start alone.
                persistent_workers=count > 0 and not isinstance(dataset, IterableDataset),
            )

    def makes(self, asked: Iterator[AskedBatch]) -> bool:
        """Whether these are the batches that it makes now."""
        return self._sampler.asked is asked

    def close(self) -> None:
        """End the workers."""
        if self._pid == os.getpid():
            if self._loader is not None:
                end_workers(self._loader)
            self._loader = None
        self._sampler.asked = iter(())

    def __getstate__(self) -> dict[str, Any]:
        """Another process makes a DataLoader of its own."""
        return TorchBatches().__dict__


def _as_it_is(made: tuple[Any, float]) -> tuple[Any, float]:
    return made


class MadeByTorch(ABC):
    """A pass whose batches a DataLoader makes. To a loader it is what a `PassRun` is."""

    leaves_room = False
    """The next pass is never begun while this one runs."""

    def __init__(
        self,
        batches: TorchBatches,
        setup: PipelineSetup,
        at: tuple[int, int],
        stats: LoaderStats,
        feed: DeviceFeed | None,
    ) -> None:
        """`at`: the pass, and its first batch."""
        self._pid = os.getpid()
        self._batches = batches
        self._setup = setup
        self._pass_index, self._index = at
        self._stats = stats
        self._feed = feed

    def __iter__(self) -> Iterator[TakenBatch]:
        return send_ahead(self._take_batches(), self._feed)

    @abstractmethod
    def _take_batches(self) -> Iterator[TakenBatch]: ...

    def _begin(self, asked: Iterator[Any]) -> None:
        nobody, serve = np.zeros(1, np.int64), np.full(1, WORKER_SEED)
        key = draw_keys(self._setup.seed, self._pass_index, nobody, serve)
        seed = int(key[0] >> np.uint64(1))
        self._asked, self._made = asked, self._batches.begin(self._setup, seed, asked)

    def _check_running(self) -> None:
        if self._pid != os.getpid():
            raise other_process_error()
        if not self._batches.makes(self._asked):
            raise PassEnded(OTHER_ITERATOR)

    def _count_batch(
        self, batch: Any, info: BatchInfo, count: int, seconds: float, waited: float, ends: Any
    ) -> TakenBatch:
        """Count a batch of so many samples. The pass ends before a batch of the numbers `ends`."""
        if self._feed is not None:
            batch = self._feed.send(batch, lambda there: there)
        self._stats = self._stats.read_once(count, seconds, waited, self._index == 0)
        self._index += 1
        return TakenBatch(batch, info, self._stats, None, self._index in ends)

    def finish(self) -> None:
        """The last batch was taken."""
        self._made = iter(())

    def extra_decodes(self) -> int:
        """The samples that were asked for and never served, as far as anybody knows."""
        return 0


class TorchPass(MadeByTorch):
    """The batches of a planned pass, one after the other."""

    def __init__(
        self,
        batches: TorchBatches,
        setup: PipelineSetup,
        planned: PlannedPass,
        stats: LoaderStats,
        feed: DeviceFeed | None,
    ) -> None:
        super().__init__(batches, setup, (planned.order.pass_index, planned.first), stats, feed)
        self._planned = planned
        self._under_way: deque[tuple[Serve, AskedBatch]] = deque()
        self._a_worker_died = False
        self._begin(_ask_batches(planned, self._under_way))

    def _take_batches(self) -> Iterator[TakenBatch]:
        while self._index < self._planned.ending.batches:
            yield self._take()

    def _take(self) -> TakenBatch:
        self._check_running()
        begun, order = time.perf_counter(), self._planned.order
        try:
            batch, seconds = self._next()
        except LoaderError:
            raise
        except Exception as error:
            batch, seconds = FailedBatch(error), 0.0
        serve, asked = self._under_way.popleft()
        draws = order.draws(serve.positions, serve.serves)
        info = BatchInfo(
            order.pass_index, self._index, serve.positions, asked.ids, serve.serves, draws
        )
        count = 0 if isinstance(batch, FailedBatch) else len(asked.ids)
        waited, ends = time.perf_counter() - begun, (self._planned.ending.batches,)
        return self._count_batch(batch, info, count, seconds, waited, ends)

    def _next(self) -> tuple[Any, float]:
        try:
            return next(self._made)
        except BaseException as error:
            if not (self._setup.workers.count and _is_death(error)):
                raise
            self._batches.close()
            if self._a_worker_died:
                raise WorkerDied(
                    f"{error}. One of this pass had died before: memory may have run out, or"
                    f" reading {type(self._setup.opened.dataset).__name__} ends its process"
                ) from error
            self._a_worker_died = True
            log.warning("%s: others read again what it had not delivered", error)
        self._begin(chain([asked for _, asked in self._under_way], self._asked))
        return self._next()

    def extra_decodes(self) -> int:
        """Those that an earlier call returned are not counted again."""
        extra = sum(len(asked.ids) for _, asked in self._under_way)
        self._under_way.clear()
        return extra


def _collated(samples: list[Any]) -> Any:
    """As torch's own function does it, but pictures of Pillow become tensors as in slots."""
    try:
        return default_collate(samples)
    except TypeError:
        if not any(isinstance(leaf, Image) for leaf in leaves_of(samples[0])):
            raise

    def stored(leaf: Any) -> Any:
        return as_tensor(leaf) if isinstance(leaf, Image) else leaf

    return default_collate([change_leaves(each, stored) for each in samples])


def _ask_batches(
    planned: PlannedPass, under_way: deque[tuple[Serve, AskedBatch]]
) -> Iterator[AskedBatch]:
    """The batches of a pass as workers are asked for them. `under_way` notes them."""
    order = planned.order
    while serves := [serve for _, serve in islice(planned.serves, TOGETHER)]:
        positions = np.concatenate([serve.positions for serve in serves])
        ids = order.ids(positions)
        drawn_for = order.draws(positions, np.full_like(positions, READING))
        end = 0
        for serve in serves:
            begin, end = end, end + len(serve.positions)
            asked = AskedBatch(order.pass_index, ids[begin:end], drawn_for[begin:end])
            under_way.append((serve, asked))
            yield asked


def _check_sendable(setup: PipelineSetup) -> None:
    sent = {
        "dataset": setup.opened.dataset,
        "collate": setup.options.collate,
        "init": setup.options.workers.init,
    }
    for name, value in sent.items():
        if why := why_not_sendable(value):
            raise SourceError(
                f"{name}={value!r} cannot be sent to a process of its own: {why}; define it in a"
                ' module that can be imported, or give start_method="fork"'
            )


def _is_death(error: BaseException) -> bool:
    """Whether a DataLoader says that one of its workers ended by itself."""
    broken = isinstance(error, EOFError | ConnectionError) and "Caught" not in str(error)
    return broken or str(error).startswith("DataLoader worker (pid")
