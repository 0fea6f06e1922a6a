"""Order and passes of a loader whose batches a DataLoader makes in its own way (`OwnBatching`)."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from loaders.arguments import Serving
from loaders.batching.device import DeviceFeed
from loaders.errors import OTHER_ITERATOR, LoaderError, PassEnded, StateError
from loaders.options import LoaderOptions
from loaders.order.reuse import Mode
from loaders.passes.pass_position import PassPosition
from loaders.passes.pass_run import TakenBatch, send_ahead
from loaders.passes.rank_order import LoaderRanks
from loaders.passes.torch_pass import TorchBatches, seed_of_workers
from loaders.pipeline import PipelineSetup
from loaders.sources.own_batching import OwnBatching
from loaders.sources.samplers import named_rank
from loaders.stats import BatchInfo, LoaderStats
from loaders.workers.pass_order import PassOrder


class OwnOrder:
    """The batches of this rank, pass by pass. To a loader it is what a `RankOrder` is."""

    named = None
    uncompared_draws = ""
    foreseen = False
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
            "buffer_bytes": options.buffer_bytes is not None,
            "on_error": options.on_error != "raise",
        }
        for name, given in refused.items():
            if given:
                raise LoaderError(
                    f"{name} does not go with a DataLoader that has {batching.why}: leave {name}"
                    " out, or give single samples and a batch_size"
                )

    @property
    def is_rank_known(self) -> bool:
        return self.ranks.is_rank_known

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

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
        """None: nobody knows."""
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

    def close(self) -> None:
        """Nothing is open."""

    def state(self, served: int) -> None:
        """What a saved state says of a stream."""

    def resume(self, told: Mapping[str, Any] | None, served: int) -> None:
        """Go on as a saved state says of a stream."""
        if told is not None:
            raise StateError(
                "the saved loader state is that of a stream that one thread iterates: make the"
                " loader as it was made in that run"
            )


class OwnPass:
    """The batches of a pass as the DataLoader makes them that was adopted."""

    leaves_room = False
    """The next pass is never begun while this one runs."""

    def __init__(
        self,
        batches: TorchBatches,
        setup: PipelineSetup,
        position: PassPosition,
        stats: LoaderStats,
        feed: DeviceFeed | None,
    ) -> None:
        batching: OwnBatching = setup.options.sampler
        self._batches = batches
        self._feed = feed
        self._stats = stats
        self._pass_index, self._index = position.pass_index, position.served
        self._limit = position.running.pass_limit
        self._of_batches, self._batch_size = batching.is_of_batches, batching.batch_size or 1
        self._items = None
        if batching.source is not None:
            self._items = batching.draw_pass(setup.seed, self._pass_index)
        self._asked = iter([] if self._items is None else self._items[self._index :])
        seed = seed_of_workers(setup, self._pass_index)
        self._made = batches.begin(setup, seed, self._asked)
        if self._items is None:
            deque(islice(self._made, self._index), maxlen=0)

    def __iter__(self) -> Iterator[TakenBatch]:
        return send_ahead(self._take_batches(), self._feed)

    def _take_batches(self) -> Iterator[TakenBatch]:
        ending = self._limit if self._items is None else len(self._items)
        nobody = np.zeros(0, np.int64)
        while self._index != ending and self._index != self._limit:
            if not self._batches.makes(self._asked):
                raise PassEnded(OTHER_ITERATOR)
            begun = time.perf_counter()
            try:
                batch = next(self._made)
            except StopIteration:
                return
            waited, begins = time.perf_counter() - begun, self._index == 0
            listed = self._items[self._index] if self._items and self._of_batches else None
            count = self._batch_size if listed is None else len(listed)
            self._stats = self._stats.read_once(count, waited, waited, begins)
            info = BatchInfo(self._pass_index, self._index, nobody, nobody, nobody, nobody)
            self._index += 1
            if self._feed is not None:
                batch = self._feed.send(batch, lambda there: there)
            last = self._index in (ending, self._limit)
            yield TakenBatch(batch, info, self._stats, None, last)

    def finish(self) -> None:
        """The last batch was taken."""
        self._made = iter(())

    def extra_decodes(self) -> int:
        """Nobody knows."""
        return 0
