"""`ReuseLoader`: decode a sample once, serve it `reuse` times. What a training loop sees.

One `iter()` is one pass: every sample of the rank's share is decoded once and served `reuse` times,
in an order that is a function of (seed, pass, rank) and of nothing else.

    ids of the pass -> DecodePool writes slots of the Slab -> ReuseBuffer says who forms the batch
                       -> gather -> augment(seed, pass, id, serve) -> batch

The state is a few integers: which pass, how many batches of it were served. Loading it replays the
(pure) order up to there and decodes what was alive in the buffer again; pixels are never saved.
"""

import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.augment import Augmentation, Draws, draw_keys
from loaders.errors import LoaderError, SourceError, StateError
from loaders.prefetch import DecodePool
from loaders.reuse import MODES, Mode, ReuseBuffer, Serve, batches_per_pass
from loaders.sources import pass_order, samples_per_rank
from loaders.storage import Slab

# A batch is nested as the user's samples are: only its leaves have types here.
Batch = Any

# Order and augmentation draw from different streams of one seed.
ORDER_STREAM = 1


@dataclass(frozen=True, slots=True)
class LoaderStats(Mapping[str, float]):
    """Counters since the loader was made (a resumed loader goes on counting)."""

    decoded: int = 0
    """Samples decoded and served: one a first serve."""
    extra_decodes: int = 0
    """Decodes beyond those: refills after a resume, look-ahead of a pass that was left early."""
    served: int = 0
    reused: int = 0
    """Serves that needed no decode."""
    stall_seconds: float = 0.0
    """Time the consumer waited for a decode."""
    serve_seconds: float = 0.0
    """Time spent gathering and augmenting batches."""
    buffer_bytes: int = 0

    def __getitem__(self, key: str) -> float:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Who the latest batch was made of."""

    pass_index: int
    batch_index: int
    ids: NDArray[np.int64]
    serves: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Serving:
    """What may change between two passes."""

    reuse: int
    reaugment: bool
    batch_size: int
    pass_limit: int | None = None
    """End passes after so many batches (None: serve them whole)."""


class ReuseLoader:
    """Drop-in for a `DataLoader` over a map-style data set whose decoding is the bottleneck."""

    def __init__(
        self,
        dataset: Any,  # map-style: len() and [i]; torch's Dataset does not promise len()
        batch_size: int = 128,
        reuse: int = 3,
        buffer_batches: int = 3,
        reaugment: bool = True,
        augment: Augmentation | Callable[[torch.Tensor], torch.Tensor] | None = None,
        mode: Mode = "rolling",
        workers: int | Literal["auto"] = "auto",
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """`augment(images, draws)` runs on a batch [N, C, H, W]; a function of one argument (a
        torchvision transform) runs on each image. Both at every serve; `reaugment=False` repeats
        the first serve's draws. `rank`, `world_size`: those of torch.distributed unless given."""
        self.dataset = dataset
        self.buffer_batches = buffer_batches
        self.augment = augment
        self.mode: Mode = mode
        self.workers = (os.cpu_count() or 1) if workers == "auto" else workers
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.pin_memory = pin_memory
        self.last_batch: BatchInfo | None = None
        self._rank = rank
        self._world_size = world_size
        self._pass = 0
        self._served_batches = 0
        self._resuming = False
        self._next = Serving(reuse, reaugment, batch_size)
        self._running = self._next
        self._slab: Slab | None = None
        self._pool: DecodePool | None = None
        self._stats = LoaderStats()
        self._check(self._next)

    # ---- what a training loop uses --------------------------------------------------------------

    def __len__(self) -> int:
        """Batches served in the pass that the next iter() starts (or goes on with)."""
        serving = self._running if self._resuming else self._next
        whole = batches_per_pass(
            samples_per_rank(len(self.dataset), self.world_size),
            serving.batch_size,
            serving.reuse,
            self.mode,
            self.drop_last,
        )
        return whole if serving.pass_limit is None else min(whole, serving.pass_limit)

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing starts before the first next(), and leaving the loop closes it.
        return self._serve_pass()

    @property
    def stats(self) -> LoaderStats:
        return replace(self._stats, buffer_bytes=self._slab.nbytes if self._slab else 0)

    @property
    def reuse(self) -> int:
        return self._next.reuse

    @property
    def reaugment(self) -> bool:
        return self._next.reaugment

    @property
    def batch_size(self) -> int:
        return self._next.batch_size

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
        self._check(serving)
        self._next = serving

    def limit_pass(self, batches: int | None) -> None:
        """End passes after `batches` batches (None: serve them whole), from the next pass on."""
        self._next = replace(self._next, pass_limit=batches)

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": len(self.dataset),
            "seed": self.seed,
            "world_size": self.world_size,
            "pass": self._pass,
            "served_batches": self._served_batches,
            "buffer_batches": self.buffer_batches,
            "mode": self.mode,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "running": asdict(self._running),
            "next": asdict(self._next),
            "stats": dict(self._stats),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was served when `state` was taken."""
        for key, mine in (
            ("samples", len(self.dataset)),
            ("seed", self.seed),
            ("mode", self.mode),
            ("buffer_batches", self.buffer_batches),
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
        self._running, self._next = Serving(**state["running"]), Serving(**state["next"])
        self._pass, self._served_batches = state["pass"], state["served_batches"]
        self._stats = LoaderStats(**state["stats"])
        self._resuming = self._served_batches > 0

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

    # ---- one pass -------------------------------------------------------------------------------

    def _serve_pass(self) -> Iterator[Batch]:
        batches = len(self)
        if self._resuming:
            self._resuming = False
        else:
            if self._served_batches:
                # The consumer left the pass before its end: its samples are gone, the next begins.
                self._pass, self._served_batches = self._pass + 1, 0
            self._running = self._next
        serving, pass_index = self._running, self._pass
        share = samples_per_rank(len(self.dataset), self.world_size)
        if serving.batch_size > share:
            raise ValueError(
                f"batch_size {serving.batch_size} is larger than a rank's share of the data set"
                f" ({share} of {len(self.dataset)} samples on {self.world_size} ranks): lower it"
            )
        ids = pass_order(
            len(self.dataset),
            seed=self.seed,
            pass_index=pass_index,
            shuffle=self.shuffle,
            rank=self.rank,
            world_size=self.world_size,
        )
        plan = ReuseBuffer(
            samples=len(ids),
            batch_size=serving.batch_size,
            reuse=serving.reuse,
            buffer_batches=self.buffer_batches,
            mode=self.mode,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            seed=(self.seed, ORDER_STREAM, pass_index, self.rank),
        )
        order = iter(plan)
        skipped = [serve for _, serve in zip(range(self._served_batches), order, strict=False)]
        uses = np.zeros(len(ids), dtype=np.int64)
        for serve in skipped:
            np.add.at(uses, serve.positions, 1)
        jobs = np.flatnonzero(uses < serving.reuse).tolist()
        slab = self._slab_for(plan.capacity, ids)

        def decode(position: int, slot: int) -> None:
            sample_id = int(ids[position])
            with _named(sample_id, pass_index):
                slab.write(slot, self.dataset[sample_id], sample_id)

        first, decoded_before = self._served_batches, self._stats.decoded
        if self._pool is not None:
            self._pool.close()  # an iterator that was left open: its workers share the slab
        self._pool = pool = DecodePool(decode, jobs, slots=slab.slots, workers=self.workers)
        try:
            with pool:
                for index, serve in zip(range(first, batches), order, strict=False):
                    batch = self._serve(serve, ids, pass_index, index, pool, slab, uses)
                    if index + 1 == batches:
                        self._pass, self._served_batches = pass_index + 1, 0
                    else:
                        self._served_batches = index + 1
                    yield batch
        finally:
            needed = self._stats.decoded - decoded_before
            extra = self._stats.extra_decodes + pool.decoded - needed
            self._stats = replace(self._stats, extra_decodes=extra)

    def _serve(
        self,
        serve: Serve,
        ids: NDArray[np.int64],
        pass_index: int,
        batch_index: int,
        pool: DecodePool,
        slab: Slab,
        uses: NDArray[np.int64],
    ) -> Batch:
        positions, serves = serve.positions, serve.serves
        stalled_before = pool.stall_seconds
        slots = pool.wait(positions)
        started = time.perf_counter()
        columns = slab.gather(slots, self.pin_memory and torch.cuda.is_available())
        np.add.at(uses, positions, 1)
        pool.release(np.unique(positions[uses[positions] == self._running.reuse]))
        info = BatchInfo(pass_index, batch_index, ids[positions], serves)
        self._augment(columns, info)
        batch = slab.nest(columns)
        self.last_batch = info
        first_serves = int((serves == 0).sum())
        self._stats = replace(
            self._stats,
            decoded=self._stats.decoded + first_serves,
            served=self._stats.served + len(serves),
            reused=self._stats.reused + len(serves) - first_serves,
            stall_seconds=self._stats.stall_seconds + pool.stall_seconds - stalled_before,
            serve_seconds=self._stats.serve_seconds + time.perf_counter() - started,
        )
        return batch

    def _augment(self, columns: list[Any], info: BatchInfo) -> None:
        if self.augment is None:
            return
        number = next((n for n, c in enumerate(columns) if getattr(c, "ndim", 0) >= 3), None)
        if number is None:
            raise LoaderError(
                "augment was given, but no part of a sample has two dimensions or more: there is"
                " no picture to augment"
            )
        serves = info.serves if self._running.reaugment else np.zeros_like(info.serves)
        draws = Draws(draw_keys(self.seed, info.pass_index, info.ids, serves))
        columns[number] = run_augmentation(self.augment, columns[number], draws)

    def _slab_for(self, slots: int, ids: NDArray[np.int64]) -> Slab:
        if self._slab is None or self._slab.slots != slots:
            # Lightning evaluates in inference mode, whose tensors nobody may write to outside it.
            with torch.inference_mode(False), _named(int(ids[0]), self._pass):
                self._slab = Slab(self.dataset[int(ids[0])], slots)
        return self._slab

    # ---- arguments ------------------------------------------------------------------------------

    def _check(self, serving: Serving) -> None:
        for name, value in (
            ("reuse", serving.reuse),
            ("batch_size", serving.batch_size),
            ("buffer_batches", self.buffer_batches),
            ("workers", self.workers),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise TypeError(
                f"ReuseLoader needs a map-style data set with len() and [i], not"
                f" {type(self.dataset).__name__}"
            )
        if len(self.dataset) == 0:
            raise SourceError("the data set is empty: there is nothing to serve")
        if serving.batch_size > len(self.dataset):
            raise ValueError(
                f"batch_size {serving.batch_size} is larger than the data set ({len(self.dataset)}"
                " samples): lower batch_size"
            )


@contextmanager
def _named(sample_id: int, pass_index: int) -> Iterator[None]:
    """Whatever a data set raises says which sample it was about."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while decoding sample {sample_id} of pass {pass_index}")
        raise


def run_augmentation(
    augment: Augmentation | Callable[[torch.Tensor], torch.Tensor],
    images: torch.Tensor,
    draws: Draws,
) -> torch.Tensor:
    """A batched augmentation on the batch; a one-argument transform on each image, seeded by it."""
    if _arguments(augment) >= 2:
        return cast(Augmentation, augment)(images, draws)
    transform = cast(Callable[[torch.Tensor], torch.Tensor], augment)
    out = []
    kept = torch.default_generator.get_state()
    try:
        for image, key in zip(images, draws.keys.tolist(), strict=True):
            torch.default_generator.manual_seed(key)
            out.append(transform(image))
    finally:
        torch.default_generator.set_state(kept)
    return torch.stack(out)


def _arguments(function: Callable[..., object]) -> int:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(target).parameters.values()
    return sum(p.kind in kinds and (p.default is p.empty or p.name == "draws") for p in parameters)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
