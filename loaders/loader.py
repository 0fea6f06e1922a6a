"""`ReuseLoader`: decode a sample once, serve it `reuse` times. This is what a training loop sees.

ids of the pass -> workers fill slots of the Slab -> ReuseBuffer says who forms the batch
                   -> workers augment it straight out of the slots (seed, pass, id, serve)
"""

import copy
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from loaders.arguments import (
    MOST_REUSE,
    SAME_AFTER_RESUME,
    PassPosition,
    Serving,
    adopted_arguments,
    check_state,
    first_serving,
)
from loaders.backends import Backend
from loaders.batching.batches import Augments, Batch, Collate
from loaders.batching.device import DeviceFeed
from loaders.batching.joint_parts import PartKinds
from loaders.cache.disk_cache import Cache
from loaders.closing import ClosedAtEnd
from loaders.dataloader_face import DataLoaderFace
from loaders.identity.loader_identity import LoaderIdentity
from loaders.options import Device, LoaderOptions, OrderOptions, Workers
from loaders.order.reuse import ORDER_VERSION, Mode, ReuseBuffer
from loaders.order.tuning import ReuseTuner
from loaders.pass_runner import PassRunner
from loaders.passes.own_batches import OwnOrder, OwnPass
from loaders.passes.pass_run import PassRun, ServedPass
from loaders.passes.rank_order import LoaderRanks, RankOrder
from loaders.passes.stream_order import StreamOrder
from loaders.passes.torch_pass import TorchPass, is_served_by_torch
from loaders.pipeline import Pipeline, PipelineSetup
from loaders.pixels.augmentation import Augmentation
from loaders.served_data import ServedData
from loaders.stats import BatchInfo, LoaderStats
from loaders.summary import Announcement, log_choice
from loaders.workers.precedence import Precedence
from loaders.workers.reader import OnError


class ReuseLoader(DataLoaderFace, ClosedAtEnd):
    """A drop-in for a `DataLoader` over a map-style data set whose decoding is the bottleneck.

        with ReuseLoader(dataset, batch_size=64, reuse=3, augment=Flip()) as loader:
            for images, labels in loader:  # a pass: each sample is decoded once, and served thrice
                ...

    A pass takes the place of `reuse` epochs. The order and what `augment` draws are functions of
    (seed, pass, rank) and of nothing else.

    dataset   map-style, with len() and [i], or a stream, or a path of either
    augment   augment(images, draws) on a batch [N, C, H, W], or augment(image) on each, at every
              serve; `reaugment=False` repeats the first serve's draws. All share those of `once`

    set_reuse() takes effect from the next pass on; state_dict() may be taken in the middle of one:
    what was alive in the buffer is decoded again. docs/reference/loader.md describes all arguments.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 128,
        reuse: int | Literal["auto"] = 3,
        buffer_batches: int = 12,
        reaugment: bool = True,
        augment: Augments | None = None,
        mode: Mode = "rolling",
        workers: int | Literal["auto"] | Workers = "auto",
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | torch.Generator | None = None,
        pin_memory: bool = False,
        *,
        rank: tuple[int, int] | None = None,
        once: Augmentation | None = None,
        buffer_bytes: int | None = None,
        backend: Backend = "native",
        cache: Cache | None = None,
        sampler: Any = None,
        collate: Collate | None = None,
        on_error: OnError = "raise",
        device: torch.device | str | Device | None = None,
        parts: PartKinds | None = None,
    ) -> None:
        to_device = device if device is None or isinstance(device, Device) else Device(device)
        order = OrderOptions(mode, shuffle, drop_last, sampler, buffer_batches, buffer_bytes)
        workers = workers if isinstance(workers, Workers) else Workers(workers)
        options = LoaderOptions(
            order, backend, once, on_error, workers, cache, augment, collate, to_device, pin_memory,
            parts,
        )  # fmt: skip
        self._tuner = ReuseTuner(MOST_REUSE) if reuse == "auto" else None
        ranks = LoaderRanks(rank)
        self._data = ServedData(dataset, options, ranks, seed)
        serving = first_serving(reuse, reaugment, batch_size).fit_to_share(self.share, drop_last)
        self.position = PassPosition(running=serving, next=serving)
        self._data.suit(serving)
        self.recommended_reuse = serving.reuse
        """By reuse="auto", from the end of a pass on: what keeps up with training."""
        self.announcement = Announcement(self._tuner is not None)
        self.precedence = Precedence()
        self.last_batch: BatchInfo | None = None
        feed = None if to_device is None else DeviceFeed(torch.device(to_device.to))
        self.runner = PassRunner(feed)
        self._stats = LoaderStats()

    @classmethod
    def from_dataloader(
        cls, loader: DataLoader[Any], reuse: int | Literal["auto"] = 3, **changes: Any
    ) -> "ReuseLoader":
        """Serve what `loader` serves, with its batch size, workers, sampler and collate function.
        `changes` replace what `loader` says; decode="scaled" is for large pictures only."""
        adopted = adopted_arguments(loader, changes, reuse)
        made = cls(**{"reuse": reuse, **adopted.arguments})
        made.announcement.adopted = adopted.served_in(made.__len__, made.reuse)
        serving, expected = made.position.next, made._data.expected_buffer(made.position.next)
        made.announcement.announce(made.setup, made.order, serving, expected)
        return made

    # ---- what a training loop uses --------------------------------------------------------------

    def __repr__(self) -> str:
        kind, serving = type(self.dataset).__name__, self.position.next
        return (
            f"ReuseLoader({kind}, batch_size={serving.batch_size}, reuse={serving.reuse},"
            f" mode={self.mode!r}, workers={self.workers}, seed={self.seed})"
        )

    def __len__(self) -> int:
        """The number of batches in the pass that the next iter() starts or continues."""
        batches = self.order.batches(self.position.serving, self.mode, self.drop_last)
        return len(self.dataset) if batches is None else batches

    def __iter__(self) -> Iterator[Batch]:
        return ServedPass(self._serve_pass())  # it starts with the first next()

    @property
    def stats(self) -> LoaderStats:
        taken = self.setup.opened.counted | self.runner.pipeline.bytes_taken
        return replace(self._stats, skipped=len(self.skipped), **taken)

    @property
    def dataset(self) -> Any:
        """The data set that was given, if it is one. The next pass serves what it holds then."""
        return self._data.dataset

    @property
    def setup(self) -> PipelineSetup:
        return self._data.setup

    @property
    def options(self) -> LoaderOptions:
        return self._data.options

    @property
    def order(self) -> RankOrder | StreamOrder | OwnOrder:
        return self._data.order

    @property
    def identity(self) -> LoaderIdentity:
        return self._data.identity

    @property
    def mode(self) -> Mode:
        return self.options.order.mode

    @property
    def shuffle(self) -> bool:
        return self.options.order.shuffle

    @property
    def drop_last(self) -> bool:
        return self.options.order.drop_last

    @property
    def buffer_batches(self) -> int:
        return self.options.order.buffer_batches

    @property
    def buffer_bytes(self) -> int | None:
        return self.options.order.buffer_bytes

    @property
    def on_error(self) -> OnError:
        return self.options.on_error

    @property
    def workers(self) -> int:
        return self.setup.workers.count

    @property
    def seed(self) -> int:
        return self._data.seed

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
        """The number of samples that this rank serves in a pass (of a stream: at most)."""
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
        return self.runner.pipeline.skipped

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
        if isinstance(self.order, OwnOrder):
            self.order.within_share(serving, self.drop_last)
        self._data.reads.check(serving := serving.fit_to_share(self.share, self.drop_last))
        self.position.next = serving

    def limit_pass(self, batches: int | None) -> None:
        """End passes after `batches` batches, from the next pass on. None: serve them whole."""
        self.position.next = replace(self.position.next, pass_limit=batches)

    def stop_shuffling(self) -> None:
        """Serve passes in the order of the data set from now on, so that all are alike."""
        self._data.stop_shuffling()
        self.close()

    def close(self) -> None:
        """End the workers and free memory. The loader may be used, and closed, again."""
        self._count_extra(self.runner.close())
        self.order.close()

    def __getstate__(self) -> dict[str, Any]:
        """Another process gets the arguments and the position, but no threads and no memory."""
        copied = ("_data", "runner", "position", "precedence")
        return self.__dict__ | {name: copy.copy(self.__dict__[name]) for name in copied}

    def apart(self) -> "ReuseLoader":
        """A second loader with the same arguments at the same position. It keeps no cache."""
        second = copy.copy(self)
        second._data = self._data.without_cache()
        return second

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.order.in_dataset,
            "order_version": ORDER_VERSION,
            **{name: getattr(self, name) for name in SAME_AFTER_RESUME},
            "world_size": self.world_size,
            **self.position.state(),
            "identity": self.identity.state(in_a_pass=self.position.served > 0),
            "stream": self.order.state(self.position.served),
            "tuner": self._tuner.state_dict() if self._tuner else None,
            "stats": self._stats.saved(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch that was served when `state` was taken."""
        self.refresh()
        self.use_drawn_seed(state["seed"])
        check_state(state, self.state_dict())
        self.identity.check(state.get("identity"))
        position = PassPosition.from_state(state)
        self._data.reads.check(position.running, position.next)
        self.order.resume(state.get("stream"), position.served)
        self._count_extra(self.runner.leave())
        self.runner.pipeline.stop()  # what was decoded ahead is not what comes next
        self.position = position
        self._stats = LoaderStats.from_state(state["stats"])
        self.identity.expect(state.get("identity") if position.resuming else None)
        if self._tuner and state["tuner"]:
            self._tuner.load_state_dict(state["tuner"])
            self.recommended_reuse = self._tuner.reuse or 1

    def use_drawn_seed(self, seed: int) -> None:
        """Use what another process or an earlier run has drawn, unless a seed was given."""
        if self._data.use_drawn(seed):
            self.close()

    def _serve_pass(self) -> Generator[Batch]:
        self._count_extra(self.runner.leave())  # another iterator may have been left open
        self.refresh()
        self.use_drawn_seed(self._data.seed_of_first_rank())
        batches = self.order.batches(self.position.serving, self.mode, self.drop_last)
        resumed = self.position.resuming
        self.position.begin()
        self.position.resuming = resumed  # if it cannot begin, the next iter() tries it again
        run = self.runner.run = self._begin(batches)
        self.position.resuming = False
        try:
            for taken in run:
                self._stats, self.last_batch = taken.stats, taken.info
                self.position.served += 1
                if self._tuner and taken.measured and (choice := self._tuner.feed(taken.measured)):
                    log_choice(choice, self.reuse)
                if taken.last:
                    self._end_pass()
                else:
                    self.runner.follow_next_pass(self.order, self.position)
                yield taken.batch
            if self.runner.run is run:  # a stream has ended, and nobody knew before
                self._end_pass()
        finally:
            if self.runner.run is run:
                self._count_extra(self.runner.leave())

    def refresh(self) -> bool:
        """Serve the data set as it is now; returns whether it has changed since it was opened."""
        if changed := self._data.refresh(self.position.serving):
            self.close()
        return changed

    def plan_of_next_pass(self) -> ReuseBuffer:
        at = self.position
        serving = self.order.within_share(at.serving, self.drop_last)
        return self._data.plan(at.pass_index, serving, self.buffer_batches)

    def _begin(self, batches: int | None) -> PassRun | TorchPass | OwnPass:
        at = self.position
        serving = at.running = self.order.within_share(at.running, self.drop_last)
        by_torch = self._tuner is None and is_served_by_torch(self.setup, serving.reuse)
        if by_torch or isinstance(self.order, OwnOrder):
            self.announcement.announce(self.setup, self.order, serving, None)
        if isinstance(self.order, OwnOrder):
            return OwnPass(self.runner.torch, self.setup, at, self._stats, self.runner.feed)
        pipeline, buffered = (None, self.buffer_batches) if by_torch else self._prepare(serving)
        plan = self._data.plan(at.pass_index, serving, buffered)
        order, in_vain = self.runner.pipeline.followed(at.pass_index, plan.slots)
        self._count_extra(in_vain)
        order = order or self.order.of_pass(at.pass_index)
        self.identity.begin(self.order.check_ranks(order, batches and batches - at.served))
        planned = self.order.planned(plan, order, at.served, batches or serving.pass_limit)
        if pipeline is not None and pipeline is not self.runner.pipeline.open:
            pipeline, _ = self._prepare(serving)  # it was closed, because a worker had failed
        if pipeline is None:
            self.runner.pipeline.close()
            return TorchPass(self.runner.torch, self.setup, planned, self._stats, self.runner.feed)
        self.runner.torch.close()
        order, jobs = planned.order, planned.jobs
        with torch.inference_mode(False):  # Lightning's; outside it such tensors are read-only
            pool = pipeline.ready_for(plan.slots, order, jobs, self.runner.made_ahead)
        self.announcement.announce(
            self.setup, self.order, serving, pipeline.buffer(serving.batch_size)
        )
        pipeline.begin(order, jobs, serving.reuse, serving.reaugment, planned.serves)
        return PassRun(pipeline, pool, planned, self._stats, self.runner.feed)

    def _prepare(self, serving: Serving) -> tuple[Pipeline, int]:
        """A pipeline for such a pass, and how many batches it buffers."""
        pipeline = self.pipeline_of_this_process()
        return pipeline, pipeline.prepare(serving, self.buffer_batches)

    def _end_pass(self) -> None:
        self._count_extra(self.runner.finish())
        self.position.end()
        if self._tuner:
            # Ranks must serve alike, so the same is recommended to all of them.
            self.recommended_reuse = self.order.ranks.largest(self._tuner.reuse or 1)

    def _count_extra(self, decodes: int) -> None:
        self._stats = replace(self._stats, extra_decodes=self._stats.extra_decodes + decodes)

    def pipeline_of_this_process(self) -> Pipeline:
        return self.runner.pipeline.get(self.setup, self.rank, self.precedence)
