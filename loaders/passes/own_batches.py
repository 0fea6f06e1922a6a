"""Order and passes of a loader whose batches a DataLoader makes in its own way (`OwnBatching`)."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from loaders.arguments import PassPosition, Serving
from loaders.batching.device import DeviceFeed
from loaders.errors import LoaderError
from loaders.options import LoaderOptions
from loaders.order.reuse import Mode
from loaders.passes.pass_run import TakenBatch
from loaders.passes.rank_order import LoaderRanks, PassOrders
from loaders.passes.torch_pass import MadeByTorch, TorchBatches
from loaders.pipeline import PipelineSetup
from loaders.sources.samplers import OwnBatching, named_rank
from loaders.stats import BatchInfo, LoaderStats
from loaders.workers.decode_work import PassOrder


class OwnOrder(PassOrders):
    """The batches of this rank, pass by pass. To a loader it is what a `RankOrder` is."""

    share = samples = 1 << 62

    def __init__(
        self, dataset: Any, batching: OwnBatching, options: LoaderOptions, ranks: LoaderRanks
    ) -> None:
        self.dataset = dataset
        self.sampler = self.batching = batching
        self.ranks = ranks
        refused = {
            "augment": options.augment is not None,
            "once": options.once is not None,
            "cache": options.cache is not None,
            "parts": options.parts is not None,
            "buffer_bytes": options.order.buffer_bytes is not None,
            "on_error": options.on_error != "raise",
        }
        for name, given in refused.items():
            if given:
                raise LoaderError(
                    f"{name} does not go with a DataLoader that has {batching.why}: leave {name}"
                    " out, or give single samples and a batch_size"
                )

    @property
    def in_dataset(self) -> int | None:
        return None if self.batching.source is None else len(self.dataset)

    def __len__(self) -> int:
        batching = self.batching
        if batching.source is not None:
            return len(batching.source)
        samples, size = len(self.dataset), batching.batch_size or 1
        return samples // size if batching.drop_last else -(-samples // size)

    def batches(self, serving: Serving, mode: Mode, drop_last: bool) -> int | None:
        try:
            whole = len(self)
        except TypeError:
            return serving.pass_limit
        return whole if serving.pass_limit is None else min(whole, serving.pass_limit)

    def within_share(self, serving: Serving, drop_last: bool) -> Serving:
        if serving.reuse != 1:
            raise LoaderError(self.batching.refusal)
        source = self.batching.source
        if source is not None and self.world_size > 1 and named_rank(source) is None:
            raise LoaderError(
                f"{self.batching.why} names no rank, so each of {self.world_size} ranks would serve"
                " all batches: give one that has rank and num_replicas"
            )
        return replace(serving, batch_size=self.batching.batch_size or 1)

    def of_pass(self, pass_index: int) -> PassOrder:
        raise LoaderError(
            f"a DataLoader that has {self.batching.why} makes whole batches, which no lanes and no"
            " shared stream can take apart: give single samples and a batch_size"
        )

    def with_seed(self, seed: int) -> "OwnOrder":
        return self


class OwnPass(MadeByTorch):
    """The batches of a pass as the DataLoader makes them that was adopted."""

    def __init__(
        self,
        batches: TorchBatches,
        setup: PipelineSetup,
        position: PassPosition,
        stats: LoaderStats,
        feed: DeviceFeed | None,
    ) -> None:
        super().__init__(batches, setup, (position.pass_index, position.served), stats, feed)
        self._batching: OwnBatching = setup.options.order.sampler
        self._limit = position.running.pass_limit
        self._items = None
        if self._batching.source is not None:
            self._items = self._batching.draw_pass(setup.seed, self._pass_index)
        self._begin(iter([] if self._items is None else self._items[self._index :]))
        if self._items is None:
            deque(islice(self._made, self._index), maxlen=0)

    def _take_batches(self) -> Iterator[TakenBatch]:
        ends = (self._limit if self._items is None else len(self._items), self._limit)
        nobody = np.zeros(0, np.int64)
        while self._index not in ends:
            self._check_running()
            begun = time.perf_counter()
            try:
                batch = next(self._made)
            except StopIteration:
                return
            waited, count = time.perf_counter() - begun, self._batching.batch_size or 1
            if self._items and self._batching.is_of_batches:
                count = len(self._items[self._index])
            info = BatchInfo(self._pass_index, self._index, nobody, nobody, nobody, nobody)
            yield self._count_batch(batch, info, count, waited, waited, ends)
