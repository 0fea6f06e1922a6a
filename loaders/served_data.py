"""A data set as it was when it was opened, and all of a loader that follows from it.

A pass serves the data set as it is when the pass begins. So what the data set holds is compared at
each beginning (`refresh`), and where something changed, it is opened anew.
"""

import copy
from dataclasses import replace
from typing import Any

import torch

from loaders.adopting.native_folder import ScaledDecoding
from loaders.arguments import Serving, settle_seed
from loaders.identity.held_values import HeldValues
from loaders.identity.loader_identity import LoaderIdentity
from loaders.opened_dataset import OpenedDataset, open_dataset
from loaders.options import LoaderOptions, settle_workers
from loaders.order.reuse import ORDER_STREAM, ReuseBuffer, buffered_batches
from loaders.passes.own_batches import OwnOrder
from loaders.passes.rank_order import LoaderRanks, RankOrder
from loaders.passes.stream_order import StreamOrder
from loaders.passes.torch_pass import is_served_by_torch
from loaders.pipeline import PipelineSetup
from loaders.read_check import ReadCheck
from loaders.sources.samplers import OwnBatching
from loaders.stats import BufferSize
from loaders.streams.streamed_samples import StreamedSamples


class ServedData:
    """What a loader serves from, made of the data set and the options, and again at changes."""

    dataset: Any
    """The user's own, as far as it is an object that can be read by ids."""
    setup: PipelineSetup
    order: RankOrder | StreamOrder | OwnOrder
    identity: LoaderIdentity
    reads: ReadCheck

    def __init__(
        self,
        dataset: Any,
        options: LoaderOptions,
        ranks: LoaderRanks,
        seed: int | torch.Generator | None,
    ) -> None:
        """`seed`: a number, or where to draw it from."""
        self.options = options
        self._given = dataset
        self._ranks = ranks
        self._seed_is_drawn = not isinstance(seed, int)
        self.seed = settle_seed(seed, ranks.given is not None and ranks.world_size > 1)
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"identity": copy.copy(self.identity)}

    def plan(self, pass_index: int, serving: Serving, buffer_batches: int) -> ReuseBuffer:
        """Which samples form each batch of a pass."""
        seed = (self.seed, ORDER_STREAM, pass_index, self.order.rank)
        return serving.plan(self.options.order, self.order.share, buffer_batches, seed)

    def expected_buffer(self, serving: Serving) -> BufferSize | None:
        """How large the buffer of such a pass will be, as far as is known. None: it has none."""
        if isinstance(self.order, OwnOrder) or is_served_by_torch(self.setup, serving.reuse):
            return None
        order, size = self.options.order, serving.batch_size
        batches = buffered_batches(order.mode, serving.reuse, order.buffer_batches)
        slots, each = min(batches * size, self.order.share), self.reads.sample_bytes
        nbytes = None if each is None else min(slots * each, order.buffer_bytes or slots * each)
        return BufferSize(-(-slots // size), nbytes, about=True)

    def without_cache(self) -> "ServedData":
        """The same, where no cache keeps samples."""
        second = copy.copy(self)
        second.options = replace(self.options, cache=None)
        second.setup = replace(self.setup, options=second.options)
        return second

    def stop_shuffling(self) -> None:
        """Have the order of the data set for all passes from now on."""
        order = replace(self.options.order, shuffle=False, sampler=None)
        self.options = replace(self.options, order=order)
        self._open()

    def refresh(self, serving: Serving) -> bool:
        """Open the data set anew, if it holds something else than when it was opened, or if passes
        that are served like this need it otherwise. Returns whether it was. (A stream is iterated
        in each pass as it is then.)"""
        streamed = isinstance(self.setup.opened.dataset, StreamedSamples)
        if streamed or (self._held is not None and HeldValues.read_from(self._given) == self._held):
            return self.suit(serving)
        before = self.identity
        self._open()
        self.identity.continue_from(before)
        self.suit(serving)
        return True

    def suit(self, serving: Serving) -> bool:
        """Have the data set open as passes need it that are served like this; refuse those that
        would freeze what is random. Returns whether it was open otherwise."""
        self.reads.check(serving)
        opened = self.reads.opened_for(serving)
        if opened is self.setup.opened:
            return False
        self.setup = replace(self.setup, opened=opened)
        return True

    def seed_of_first_rank(self) -> int:
        """Every rank asks, also one that was given a seed: it cannot know whether others were."""
        return self._ranks.gathered(self.seed)[0] if self._ranks.all_together else self.seed

    def use_drawn(self, seed: int) -> bool:
        """Use what another rank or an earlier run has drawn, unless a seed was given. Returns
        whether the seed changes."""
        if not self._seed_is_drawn or seed == self.seed:
            return False
        self.seed = seed
        self.setup, self.order = replace(self.setup, seed=seed), self.order.with_seed(seed)
        return True

    def _open(self) -> None:
        options, dataset = self.options, self._given
        self._held = HeldValues.read_from(dataset)
        sampler, shuffle = options.order.sampler, options.order.shuffle
        batching = sampler if isinstance(sampler, OwnBatching) else None
        opened = OpenedDataset(dataset, None, None) if batching else open_dataset(dataset, options)
        workers = settle_workers(options.workers, opened.dataset)
        if batching and workers.count:
            workers = replace(workers, kind="process", because="as the DataLoader has them")
        self.setup = PipelineSetup(opened, options, workers, self.seed)
        streamed = isinstance(opened.dataset, StreamedSamples)
        dataset = dataset.dataset if isinstance(dataset, ScaledDecoding) else dataset
        readable = hasattr(dataset, "__getitem__") and not isinstance(dataset, str) and not streamed
        self.dataset = dataset if readable else opened.dataset
        ranks = self._ranks
        if batching:
            self.order = OwnOrder(dataset, batching, options, ranks)
        elif isinstance(opened.dataset, StreamedSamples):
            self.order = StreamOrder(opened.dataset, self.seed, shuffle, ranks)
        else:
            self.order = RankOrder(opened.dataset, sampler, self.seed, shuffle, ranks)
        self.identity = LoaderIdentity(opened.dataset, sampler)
        self.reads = ReadCheck(self.setup)
