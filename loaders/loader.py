"""`ReuseLoader`: decode a sample once, serve it `reuse` times. This is what a training loop sees.

One `iter()` is one pass: every sample of the rank's share is decoded once and served `reuse` times,
in an order that is a function of (seed, pass, rank) and of nothing else.

    ids of the pass -> workers fill slots of the Slab -> ReuseBuffer says who forms the batch
                       -> workers augment it straight out of the slots (seed, pass, id, serve)

The state is a few integers: which pass, and how many batches of it were served. Loading it replays
the order up to there, which is pure, and decodes again what was alive in the buffer. Pixels are
never saved.
"""

import copy
import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from loaders.adopted import adopted_arguments
from loaders.arguments import (
    SAME_AFTER_RESUME,
    cache_setup,
    check_options,
    check_state,
    first_serving,
    tuner_for,
    worker_count,
)
from loaders.backends import Backend
from loaders.batches import AugmentOn, Batch, Collate, Transform
from loaders.cache.cache import CacheKind
from loaders.device import feed_to
from loaders.identity.loader_identity import LoaderIdentity
from loaders.opened_dataset import open_dataset
from loaders.options import (
    BatchOptions,
    CacheOptions,
    DecodingOptions,
    OrderOptions,
    WorkerKind,
    WorkerOptions,
)
from loaders.order.reuse import ORDER_STREAM, Mode, ReuseBuffer, batches_per_pass
from loaders.pass_position import PassPosition
from loaders.passes import PassReplay, PassRun, PlannedPass
from loaders.pipeline import AHEAD, Pipeline, PipelineSetup
from loaders.pixels.augmentation import Augmentation
from loaders.rank_order import LoaderRanks, RankOrder
from loaders.read_check import ReadCheck
from loaders.stats import BatchInfo, LoaderStats
from loaders.summary import Announcement
from loaders.workers.pass_order import PassOrder
from loaders.workers.precedence import Precedence
from loaders.workers.processes import StartMethod
from loaders.workers.reader import OnError

log = logging.getLogger(__name__)


class ReuseLoader:
    """A drop-in for a `DataLoader` over a map-style data set whose decoding is the bottleneck."""

    def __init__(
        self,
        dataset: Any,  # map-style: len() and [i]; torch's Dataset does not promise len()
        batch_size: int = 128,
        reuse: int | Literal["auto"] = 3,
        buffer_batches: int = 3,
        reaugment: bool = True,
        augment: Augmentation | Transform | None = None,
        mode: Mode = "rolling",
        workers: int | Literal["auto"] = "auto",
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        most_reuse: int | None = None,
        once: Augmentation | None = None,
        buffer_bytes: int | None = None,
        worker_kind: WorkerKind = "thread",
        start_method: StartMethod | None = None,
        backend: Backend = "native",
        cache: CacheKind | None = None,
        cache_bytes: int | None = None,
        cache_dir: str | Path | None = None,
        sampler: Any = None,
        collate: Collate | None = None,
        on_error: OnError = "raise",
        device: torch.device | str | None = None,
        augment_on: AugmentOn = "cpu",
        cache_key: str | None = None,
    ) -> None:
        """docs/loader.md describes all arguments. `augment(images, draws)` runs on a batch
        [N, C, H, W]; a function of one argument (a torchvision transform) runs on each image. Both
        run at every serve; `reaugment=False` repeats the draws of the first serve.
        `once(images, draws)` runs when a sample is decoded, and all its serves share its draws."""
        order = OrderOptions(mode, shuffle, drop_last, seed, sampler, buffer_batches, buffer_bytes)
        decoding = DecodingOptions(backend, once, on_error)
        reading = WorkerOptions(worker_count(workers), worker_kind, start_method)
        caching = CacheOptions(cache, cache_bytes, cache_dir, cache_key)
        batches = BatchOptions(augment, collate, device, augment_on, pin_memory)
        check_options(order, decoding, reading, caching, batches)
        kept = cache_setup(caching)
        self._tuner = tuner_for(reuse, most_reuse)
        serving = first_serving(reuse, reaugment, batch_size)
        self.position = PassPosition(running=serving, next=serving)
        opened = open_dataset(dataset, decoding, batches, caching)
        self.setup = PipelineSetup(opened, decoding, reading, batches, kept, seed, buffer_bytes)
        self.order = RankOrder(
            opened.dataset, sampler, seed, shuffle, LoaderRanks(rank, world_size)
        )
        serving.check(self.order.samples)
        self.identity = LoaderIdentity(opened.dataset, sampler)
        self._reads = ReadCheck(opened, reading, kept is not None, self._tuner is not None)
        self._reads.check(serving)
        self.announcement = Announcement(self.setup, self.order, self._tuner is not None)
        self.dataset = opened.dataset
        self.workers = reading.count
        self.buffer_batches = buffer_batches
        self.buffer_bytes = buffer_bytes
        self.mode: Mode = mode
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.on_error = on_error
        self.batch_options = batches
        self.made_ahead = AHEAD
        self.precedence = Precedence()  # `behind`: its workers give way to other loaders'
        self.last_batch: BatchInfo | None = None
        self._feed = feed_to(device)
        self._pipeline: Pipeline | None = None
        self._closer: weakref.finalize[..., ReuseLoader] | None = None
        self._following: PassOrder | None = None
        self._skipped: dict[int, str] = {}
        self.run: PassRun | None = None
        self._stats = LoaderStats()

    @classmethod
    def from_dataloader(
        cls,
        loader: torch.utils.data.DataLoader[Any],
        reuse: int | Literal["auto"] = 3,
        **changes: Any,
    ) -> "ReuseLoader":
        """Serve what `loader` serves, with its batch size, workers, sampler and collate function.
        `changes` are further arguments of `ReuseLoader`; they replace what `loader` says."""
        adopted = adopted_arguments(loader, changes)
        made = cls(**{"reuse": reuse, **adopted.arguments})
        made.announcement.adopted = adopted
        made.announcement.say(made.position.next)
        return made

    # ---- what a training loop uses --------------------------------------------------------------

    def __len__(self) -> int:
        """The number of batches in the pass that the next iter() starts or continues."""
        serving = self.position.serving
        size, reuse = serving.batch_size, serving.reuse
        whole = batches_per_pass(self.share, size, reuse, self.mode, self.drop_last)
        return whole if serving.pass_limit is None else min(whole, serving.pass_limit)

    def __iter__(self) -> Iterator[Batch]:
        # A generator starts nothing before the first next(), and leaving the loop closes it.
        return self._serve_pass()

    @property
    def stats(self) -> LoaderStats:
        taken = self._pipeline.bytes_taken if self._pipeline else {}
        return replace(self._stats, skipped=len(self.skipped), **taken)

    @property
    def reuse(self) -> int:
        return self.position.next.reuse

    @property
    def reaugment(self) -> bool:
        return self.position.next.reaugment

    @property
    def batch_size(self) -> int:
        return self.position.next.batch_size

    @property
    def share(self) -> int:
        """The number of samples that this rank serves in a pass."""
        return self.order.share

    @property
    def rank(self) -> int:
        return self.order.rank

    @property
    def world_size(self) -> int:
        return self.order.world_size

    @property
    def skipped(self) -> dict[int, str]:
        """The samples that could not be read so far, and why (on_error="skip")."""
        return self._skipped | (self._pipeline.reader.skipped if self._pipeline else {})

    def set_reuse(
        self, reuse: int, *, reaugment: bool | None = None, batch_size: int | None = None
    ) -> None:
        """Serve each sample `reuse` times from the next pass on."""
        serving = replace(
            self.position.next,
            reuse=reuse,
            reaugment=self.reaugment if reaugment is None else reaugment,
            batch_size=self.batch_size if batch_size is None else batch_size,
        )
        serving.check(self.order.samples)
        self._reads.check(serving)
        self.position.next = serving

    def limit_pass(self, batches: int | None) -> None:
        """End passes after `batches` batches, from the next pass on. None: serve them whole."""
        self.position.next = replace(self.position.next, pass_limit=batches)

    def close(self) -> None:
        """End the workers and free memory. The loader may be used, and closed, again."""
        self._leave()
        if self._pipeline is not None:
            if self._closer is not None:
                self._closer()
            self._drop_following()
            self._skipped |= self._pipeline.reader.skipped
            self._pipeline = None

    def __enter__(self) -> "ReuseLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Another process gets the arguments and the position, but no threads and no memory."""
        nowhere = dict.fromkeys(("_pipeline", "_closer", "_following", "run"))
        copied = ("identity", "_skipped", "position", "precedence")
        return self.__dict__ | nowhere | {name: copy.copy(self.__dict__[name]) for name in copied}

    def apart(self) -> "ReuseLoader":
        """A second loader with the same arguments at the same position. It keeps no cache."""
        second = copy.copy(self)
        second.setup = replace(self.setup, cache=None)
        return second

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": len(self.dataset),
            **{name: getattr(self, name) for name in SAME_AFTER_RESUME},
            "world_size": self.world_size,
            **self.position.state(),
            "identity": self.identity.state(in_a_pass=self.position.served > 0),
            "tuner": self._tuner.state_dict() if self._tuner else None,
            "stats": {**self._stats, "serves": list(self._stats.serves)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch that was served when `state` was taken."""
        check_state(state, self.state_dict())
        self.identity.check(state.get("identity"))
        position = PassPosition.of(state)
        self._reads.check(position.running, position.next)
        self._leave()
        if self._pipeline is not None and self._following is not None:
            self._pipeline.stop()  # what was decoded ahead is not what comes next
            self._following = None
        self.position = position
        self._stats = LoaderStats(**{**state["stats"], "serves": tuple(state["stats"]["serves"])})
        self.identity.expect(state.get("identity") if position.resuming else None)
        if self._tuner and state["tuner"]:
            self._tuner.load_state_dict(state["tuner"])

    # ---- one pass -------------------------------------------------------------------------------

    def _serve_pass(self) -> Iterator[Batch]:
        self._leave()  # another iterator may have been left open
        batches = len(self)
        self.position.begin()
        run = self.run = self._begin(batches)
        try:
            for taken in run:
                self._stats, self.last_batch = taken.stats, taken.info
                self.position.served += 1
                if self._tuner and (choice := self._tuner.feed(taken.measured)):
                    log.info("reuse %d from the next pass on: %s", choice.reuse, choice.reason)
                if taken.last:
                    self._end(run)
                else:
                    self._look_ahead(run)
                yield taken.batch
        finally:
            if self.run is run:
                self._leave()

    def _begin(self, batches: int) -> PassRun:
        at, share = self.position, self.share
        serving, pass_index, first = at.running, at.pass_index, at.served
        serving.check_share(share, len(self.dataset), self.world_size)
        self.announcement.say(serving)
        pipeline = self.pipeline_of_this_process()
        plan = ReuseBuffer(
            samples=share,
            batch_size=serving.batch_size,
            reuse=serving.reuse,
            buffer_batches=pipeline.buffer_of(self.buffer_batches, serving.batch_size),
            mode=self.mode,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            seed=(self.seed, ORDER_STREAM, pass_index, self.rank),
        )
        replay = PassReplay.of(plan, first)
        order = self._order_of_pass(pass_index, plan.capacity, pipeline)
        self.identity.begin(self.order.check_ranks(order, batches - first))
        jobs = np.flatnonzero(replay.uses < serving.reuse)
        # Lightning evaluates in inference mode, and nobody may write to the tensors of that mode
        # outside it.
        with torch.inference_mode(False):
            pool = pipeline.ready_for(plan.capacity, order, jobs, self.made_ahead)
        numbered = zip(range(first, batches), replay.serves, strict=False)
        pipeline.begin(order, jobs, serving.reuse, serving.reaugment, numbered)
        planned = PlannedPass(order, replay, first, batches)
        return PassRun(pipeline, pool, planned, self._stats, self._feed)

    def _order_of_pass(self, pass_index: int, slots: int, pipeline: Pipeline) -> PassOrder:
        """The order that the workers follow already, where it fits; else a new one."""
        order, self._following = self._following, None
        if order is not None and (pipeline.slots != slots or order.pass_index != pass_index):
            pipeline.stop()
            self._count_extra(order.progress.decoded)
            order = None
        return order or self.order.of_pass(pass_index)

    def _look_ahead(self, run: PassRun) -> None:
        """Let the workers go on with the next pass when this one's samples are all taken."""
        serving = self.position.running
        if (
            self._following is None
            and run.pool.all_taken
            and self.order.sampler is None
            and run.whole
            and self.batch_size == serving.batch_size
            and self.setup.opened.decoded is None
        ):
            self._following = self.order.of_pass(self.position.pass_index + 1)
            assert self._pipeline is not None
            self._pipeline.follow(self._following, serving.reuse)

    def _end(self, run: PassRun) -> None:
        run.pool.finish()
        self._count_extra(run.extra_decodes())
        self.run = None
        self.position.end()
        if self._tuner:
            self._take_over(self._tuner.reuse or self.reuse)

    def _leave(self) -> None:
        """Stop a pass that was not served to its end."""
        run, self.run = self.run, None
        if run is None or self._pipeline is None:
            return
        self._pipeline.stop()
        self._count_extra(run.extra_decodes())
        self._drop_following()

    def _drop_following(self) -> None:
        following, self._following = self._following, None
        self._count_extra(0 if following is None else following.progress.decoded)

    def _count_extra(self, decodes: int) -> None:
        self._stats = replace(self._stats, extra_decodes=self._stats.extra_decodes + decodes)

    def _take_over(self, tuned: int) -> None:
        """Serve with the tuner's choice. Ranks must serve alike: all take the largest."""
        reuse = self.order.ranks.largest(tuned)
        if reuse != self.reuse:
            log.info("reuse %d from this pass on, it was %d", reuse, self.reuse)
        self.position.next = replace(self.position.next, reuse=reuse)

    # ---- the pipeline ---------------------------------------------------------------------------

    def pipeline_of_this_process(self) -> Pipeline:
        pipeline = self._pipeline
        # A forked process has no threads of its parent, and must not touch its memory.
        if pipeline is None or pipeline.pid != os.getpid():
            pipeline = self._pipeline = Pipeline(self.setup, self.rank, self.precedence)
            self._closer = weakref.finalize(self, pipeline.close)
        return pipeline
