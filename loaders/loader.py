"""`ReuseLoader`: decode a sample once, serve it `reuse` times. What a training loop sees.

One `iter()` is one pass: every sample of the rank's share is decoded once and served `reuse` times,
in an order that is a function of (seed, pass, rank) and of nothing else.

    ids of the pass -> workers fill slots of the Slab -> ReuseBuffer says who forms the batch
                       -> workers augment it straight out of the slots (seed, pass, id, serve)

The state is a few integers: which pass, how many batches of it were served. Loading it replays the
(pure) order up to there and decodes what was alive in the buffer again; pixels are never saved.
"""

import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from loaders.adopt import from_dataloader, resident, split_dataset
from loaders.arguments import (
    MOST_REUSE,
    Serving,
    at_least_one,
    check_dataset,
    check_effects,
    check_words,
    first_serving,
)
from loaders.augment import Augmentation
from loaders.backends import Backend, open_source
from loaders.batches import AugmentOn, Batch, Collate, Transform
from loaders.cache import CacheKind, CacheSetup
from loaders.device import DeviceFeed
from loaders.engine import Engine, Resident, Setup, WorkerKind
from loaders.errors import StateError
from loaders.machine import usable_cpus
from loaders.passes import PassRun, Replay
from loaders.processes import StartMethod
from loaders.reader import OnError, PassOrder
from loaders.reuse import Mode, ReuseBuffer, batches_per_pass
from loaders.samplers import SamplerOrder, drawn_before
from loaders.sources import pass_order, samples_per_rank, shared_out
from loaders.stats import BatchInfo, LoaderStats
from loaders.tuning import ReuseTuner

log = logging.getLogger(__name__)

# Order and augmentation draw from different streams of one seed.
ORDER_STREAM = 1


class ReuseLoader:
    """Drop-in for a `DataLoader` over a map-style data set whose decoding is the bottleneck."""

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
    ) -> None:
        """All arguments: docs/loader.md. `augment(images, draws)` runs on a batch
        [N, C, H, W]; a function of one argument (a torchvision transform) runs on each image. Both
        at every serve; `reaugment=False` repeats the first serve's draws. `once(images, draws)`
        runs when a sample is decoded, and all its serves share what it drew."""
        check_words(
            mode=mode, backend=backend, worker_kind=worker_kind, start_method=start_method,
            on_error=on_error, augment_on=augment_on,
        )  # fmt: skip
        check_effects(
            auto=reuse == "auto", most_reuse=most_reuse, worker_kind=worker_kind,
            start_method=start_method, cache=cache, cache_bytes=cache_bytes, cache_dir=cache_dir,
            device=device, augment_on=augment_on,
        )  # fmt: skip
        at_least_one("buffer_batches", buffer_batches)
        self.buffer_batches = buffer_batches
        self.buffer_bytes = buffer_bytes
        self.mode: Mode = mode
        self.workers = usable_cpus() if workers == "auto" else workers
        at_least_one("workers", self.workers)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self._sampler = sampler
        self.last_batch: BatchInfo | None = None
        self._rank = rank
        self._world_size = world_size
        self._pass = 0
        self._served_batches = 0
        self._resuming = False
        self._tuner = ReuseTuner(most_reuse or MOST_REUSE) if reuse == "auto" else None
        self._next = first_serving(reuse, reaugment, batch_size)
        self._running = self._next
        self._engine: Engine | None = None
        self._closer: weakref.finalize[..., ReuseLoader] | None = None
        self._following: PassOrder | None = None
        self._skipped: dict[int, str] = {}
        self._run: PassRun | None = None
        self._stats = LoaderStats()
        self._feed = None if device is None else DeviceFeed(torch.device(device))
        self.dataset = open_source(dataset, backend)
        check_dataset(self.dataset)
        self._next.check(self._drawn())
        split = None
        if augment is None and once is None:
            self.dataset, split = split_dataset(self.dataset)
            if split is not None and split.decode is None and split.augment is None:
                log.warning("%s", split.report)
        folder = None if cache_dir is None else Path(cache_dir)
        kept = None if cache is None else CacheSetup(cache, cache_bytes, folder)
        self._setup = Setup(
            dataset=self.dataset,
            augment=augment,
            split=split,
            once=once,
            collate=collate,
            on_error=on_error,
            workers=self.workers,
            worker_kind=worker_kind,
            start_method=start_method,
            buffer_bytes=buffer_bytes,
            pin_memory=pin_memory and torch.cuda.is_available(),
            augment_on=augment_on,
            seed=seed,
            resident=None if once or cache or collate else _resident(self.dataset),
            cache=kept,
        )

    @classmethod
    def from_dataloader(
        cls,
        loader: torch.utils.data.DataLoader[Any],
        reuse: int | Literal["auto"] = 3,
        **changes: Any,
    ) -> "ReuseLoader":
        """Serves what `loader` serves: its data set, batch size, workers, sampler, collate
        function. `changes` are further arguments of `ReuseLoader`, and win."""
        adopted = from_dataloader(loader)
        for note in adopted.notes:
            log.warning("%s", note)
        taken = {
            "batch_size": adopted.batch_size,
            "shuffle": adopted.shuffle,
            "sampler": adopted.sampler,
            "drop_last": adopted.drop_last,
            "workers": adopted.workers,
            "collate": adopted.collate,
            "pin_memory": adopted.pin_memory,
            "rank": adopted.rank,
            "world_size": adopted.world_size,
        }
        if adopted.seed is not None:
            taken["seed"] = adopted.seed
        return cls(adopted.dataset, **{**taken, "reuse": reuse, **changes})

    # ---- what a training loop uses --------------------------------------------------------------

    def __len__(self) -> int:
        """Batches served in the pass that the next iter() starts (or goes on with)."""
        serving = self._running if self._resuming else self._next
        whole = batches_per_pass(
            self._share(), serving.batch_size, serving.reuse, self.mode, self.drop_last
        )
        return whole if serving.pass_limit is None else min(whole, serving.pass_limit)

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing starts before the first next(), and leaving the loop closes it.
        return self._serve_pass()

    @property
    def stats(self) -> LoaderStats:
        engine = self._engine
        if engine is None:
            return replace(self._stats, skipped=len(self._skipped))
        return replace(
            self._stats,
            skipped=len(self.skipped),
            buffer_bytes=engine.slab.nbytes if engine.slab else 0,
            batch_bytes=engine.blocks.made_bytes,
            cache_bytes=engine.cache.nbytes if engine.cache else 0,
        )

    @property
    def reuse(self) -> int:
        return self._next.reuse

    @property
    def reaugment(self) -> bool:
        return self._next.reaugment

    @property
    def batch_size(self) -> int:
        return self._next.batch_size

    @property
    def skipped(self) -> dict[int, str]:
        """The samples that could not be read so far, and why (on_error="skip")."""
        return self._skipped | (self._engine.reader.skipped if self._engine else {})

    def set_reuse(
        self, reuse: int, *, reaugment: bool | None = None, batch_size: int | None = None
    ) -> None:
        """Serve each sample `reuse` times from the next pass on."""
        serving = replace(
            self._next,
            reuse=reuse,
            reaugment=self.reaugment if reaugment is None else reaugment,
            batch_size=self.batch_size if batch_size is None else batch_size,
        )
        serving.check(self._drawn())
        self._next = serving

    def limit_pass(self, batches: int | None) -> None:
        """End passes after `batches` batches (None: serve them whole), from the next pass on."""
        self._next = replace(self._next, pass_limit=batches)

    def close(self) -> None:
        """End workers and let go of memory. The loader may be used again; safe to call again."""
        self._leave()
        if self._engine is not None:
            if self._closer is not None:
                self._closer()
            self._drop_following()
            self._skipped |= self._engine.reader.skipped
            self._engine = None

    def __enter__(self) -> "ReuseLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """To another process go the arguments and the position, no threads and no memory."""
        nowhere = {"_engine": None, "_closer": None, "_following": None, "_run": None}
        return self.__dict__ | nowhere

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": len(self.dataset),
            "seed": self.seed,
            "world_size": self.world_size,
            "pass": self._pass,
            "served_batches": self._served_batches,
            "buffer_batches": self.buffer_batches,
            "buffer_bytes": self.buffer_bytes,
            "mode": self.mode,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "running": asdict(self._running),
            "next": asdict(self._next),
            "tuner": self._tuner.state_dict() if self._tuner else None,
            "stats": {**self._stats, "serves": list(self._stats.serves)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was served when `state` was taken."""
        for key, mine in (
            ("samples", len(self.dataset)),
            ("seed", self.seed),
            ("mode", self.mode),
            ("buffer_batches", self.buffer_batches),
            ("buffer_bytes", self.buffer_bytes),
            ("shuffle", self.shuffle),
            ("drop_last", self.drop_last),
        ):
            if state[key] != mine:
                raise StateError(
                    f"the saved loader state has {key}={state[key]}, this loader has {key}={mine}:"
                    " its order would not continue; make the loader as it was"
                )
        if state["served_batches"] and state["world_size"] != self.world_size:
            raise StateError(
                f"the saved loader state is in the middle of pass {state['pass']} on"
                f" {state['world_size']} ranks, this run has {self.world_size}: another number of"
                " ranks can only resume where a pass ends"
            )
        self._leave()
        if self._engine is not None and self._following is not None:
            self._engine.stop()  # what was decoded ahead is not what comes next
            self._following = None
        self._running, self._next = Serving(**state["running"]), Serving(**state["next"])
        self._pass, self._served_batches = state["pass"], state["served_batches"]
        self._stats = LoaderStats(**{**state["stats"], "serves": tuple(state["stats"]["serves"])})
        self._resuming = self._served_batches > 0
        if self._tuner and state["tuner"]:
            self._tuner.load_state_dict(state["tuner"])

    # ---- ranks ----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        if self._rank is not None:
            return self._rank
        return torch.distributed.get_rank() if _distributed() else 0

    @property
    def world_size(self) -> int:
        if self._world_size is not None:
            return self._world_size
        return torch.distributed.get_world_size() if _distributed() else 1

    def _drawn(self) -> int:
        """Samples of a pass, on all ranks."""
        return len(self.dataset) if self._sampler is None else len(self._sampler)

    def _share(self) -> int:
        """Samples of a pass on this rank."""
        return samples_per_rank(self._drawn(), self.world_size)

    def _order(self, pass_index: int) -> PassOrder:
        ranks = {"rank": self.rank, "world_size": self.world_size}
        if self._sampler is None:
            ids = pass_order(
                len(self.dataset),
                seed=self.seed,
                pass_index=pass_index,
                shuffle=self.shuffle,
                **ranks,
            )
            return PassOrder(pass_index, ids)
        ids = shared_out(SamplerOrder.order(self._sampler, self.seed, pass_index), **ranks)
        return PassOrder(pass_index, ids, drawn_before(ids))

    # ---- one pass -------------------------------------------------------------------------------

    def _serve_pass(self) -> Iterator[Batch]:
        self._leave()  # an iterator that was left open
        batches = len(self)
        if self._resuming:
            self._resuming = False
        else:
            if self._served_batches:
                # The consumer left the pass before its end: its samples are gone, the next begins.
                self._pass, self._served_batches = self._pass + 1, 0
            self._running = self._next
        run = self._run = self._begin(batches)
        try:
            for taken in run:
                self._stats, self.last_batch = taken.stats, taken.info
                self._served_batches += 1
                if self._tuner and (choice := self._tuner.feed(taken.measured)):
                    log.info("reuse %d from the next pass on: %s", choice.reuse, choice.reason)
                if taken.last:
                    self._end(run)
                else:
                    self._look_ahead(run)
                yield taken.batch
        finally:
            if self._run is run:
                self._leave()

    def _begin(self, batches: int) -> PassRun:
        serving, pass_index, first = self._running, self._pass, self._served_batches
        share = self._share()
        if serving.batch_size > share:
            raise ValueError(
                f"batch_size {serving.batch_size} is larger than a rank's share of the data set"
                f" ({share} of {len(self.dataset)} samples on {self.world_size} ranks): lower it"
            )
        engine = self._engine_here()
        plan = ReuseBuffer(
            samples=share,
            batch_size=serving.batch_size,
            reuse=serving.reuse,
            buffer_batches=self._buffer_within_limit(engine, serving.batch_size),
            mode=self.mode,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            seed=(self.seed, ORDER_STREAM, pass_index, self.rank),
        )
        replay = Replay.of(plan, first)
        order, self._following = self._following, None
        if order is not None and (engine.slots != plan.capacity or order.pass_index != pass_index):
            engine.stop()
            self._count_extra(order.decoded)
            order = None
        order = order or self._order(pass_index)
        jobs = np.flatnonzero(replay.uses < serving.reuse)
        # Lightning evaluates in inference mode, whose tensors nobody may write to outside it.
        with torch.inference_mode(False):
            pool = engine.ready_for(plan.capacity, order, jobs)
        numbered = zip(range(first, batches), replay.serves, strict=False)
        engine.begin(order, jobs, serving.reuse, serving.reaugment, numbered)
        return PassRun(engine, pool, order, replay, first, batches, self._stats, self._feed)

    def _look_ahead(self, run: PassRun) -> None:
        """Let the workers go on with the next pass where this one's samples are all taken."""
        serving = self._running
        if (
            self._following is None
            and run.pool.all_taken
            and self._sampler is None
            and run.whole
            and self._next.batch_size == serving.batch_size
            and self._setup.resident is None
        ):
            self._following = self._order(self._pass + 1)
            assert self._engine is not None
            self._engine.follow(self._following, serving.reuse)

    def _end(self, run: PassRun) -> None:
        run.pool.finish()
        self._count_extra(run.extra_decodes())
        self._run = None
        self._pass, self._served_batches = self._pass + 1, 0
        if self._tuner:
            self._choose()

    def _leave(self) -> None:
        """Stop a pass that was not served to its end."""
        run, self._run = self._run, None
        if run is None or self._engine is None:
            return
        self._engine.stop()
        self._count_extra(run.extra_decodes())
        self._drop_following()

    def _drop_following(self) -> None:
        following, self._following = self._following, None
        self._count_extra(0 if following is None else following.decoded)

    def _count_extra(self, decodes: int) -> None:
        self._stats = replace(self._stats, extra_decodes=self._stats.extra_decodes + decodes)

    def _choose(self) -> None:
        """Take over what the tuner found; ranks, which must serve alike, the most of them."""
        assert self._tuner is not None
        reuse = self._tuner.reuse or self._next.reuse
        if self._world_size is None and _distributed():
            wishes: list[Any] = [None] * self.world_size
            torch.distributed.all_gather_object(wishes, reuse)
            reuse = max(wishes)
        if reuse != self._next.reuse:
            log.info("reuse %d from this pass on, it was %d", reuse, self._next.reuse)
        self._next = replace(self._next, reuse=reuse)

    # ---- what it runs on ------------------------------------------------------------------------

    def _engine_here(self) -> Engine:
        if self._engine is not None and self._engine.pid != os.getpid():
            self._engine = None  # a fork has no threads of its parent, and no say over its memory
        if self._engine is None:
            self._engine = Engine(self._setup, self.rank)
            self._closer = weakref.finalize(self, self._engine.close)
        return self._engine

    def _buffer_within_limit(self, engine: Engine, batch_size: int) -> int:
        if self.buffer_bytes is None or self._setup.resident is not None:
            return self.buffer_batches
        return min(self.buffer_batches, engine.batches_within(self.buffer_bytes, batch_size))


def _resident(dataset: Any) -> Resident | None:
    there = resident(dataset)
    return None if there is None else Resident(tuple(there[0]), there[1])


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
