"""A loader logs once what it does: what is cached and redone, the seed, who reads, its rank.

made from a DataLoader   logged at once
made by hand             logged when its first pass begins

The level is WARNING if something has no effect or cannot be compared, or if the buffer takes much
of the memory; else INFO.
"""

import logging
from typing import Any, cast

from loaders.adopting.native_folder import NativeFolder
from loaders.adopting.torchvision_steps import name_of
from loaders.arguments import AdoptedArguments, Serving
from loaders.batching.batches import each_view
from loaders.order.tuning import Choice
from loaders.passes.own_batches import OwnOrder
from loaders.passes.rank_order import RankOrder
from loaders.passes.stream_order import StreamOrder
from loaders.passes.torch_pass import is_served_by_torch
from loaders.pipeline import PipelineSetup
from loaders.stats import BufferSize
from loaders.streams.streamed_samples import StreamedSamples
from loaders.workers.machine import free_memory, launched_ranks

log = logging.getLogger(__name__)

AnyOrder = RankOrder | StreamOrder | OwnOrder


def _parts_of(
    setup: PipelineSetup,
    serving: Serving,
    tuned: bool,
    order: AnyOrder,
    adopted: AdoptedArguments | None,
    buffer: BufferSize | None,
) -> tuple[str, ...]:
    """What a loader does, in parts of one line. An empty one is left out. `tuned`: whether another
    reuse may be recommended. `adopted`: what came from a DataLoader."""
    in_memory, options = setup.opened.decoded is not None, setup.options
    ranks = "ranks as torch.distributed says"
    if order.is_rank_known:
        ranks = f"rank {order.rank} of {order.world_size}"
    return (
        _describe_samples(setup, serving, tuned, order),
        f"reuse {serving.reuse}"
        f"{' (auto recommends one when it is sure)' if tuned else ''}"
        f"{'' if serving.reaugment else ' with the same draws'}",
        f"kept in the cache ({options.cache.kind})" if options.cache else "",
        "" if buffer is None or in_memory else buffer.description,
        "each batch has all samples" if serving.batch_size == order.share else "",
        f"seed {setup.seed}{_in_brackets(adopted.seed_from if adopted else '')}",
        "read by nobody: it lies decoded in memory" if in_memory else _describe_readers(setup),
        ranks,
    )


def _describe_samples(setup: PipelineSetup, serving: Serving, tuned: bool, order: AnyOrder) -> str:
    """What is cached and what is redone."""
    if isinstance(order, OwnOrder):
        return f"made as the DataLoader makes them, which has {order.batching.why}"
    if not tuned and is_served_by_torch(setup, serving.reuse):
        return "made by torch's DataLoader: nothing is reused, cached or redone"
    opened, augments = setup.opened, each_view(setup.options.augment)
    dataset = opened.dataset.folder if isinstance(opened.dataset, NativeFolder) else opened.dataset
    kind = type(dataset).__name__
    if isinstance(dataset, StreamedSamples):
        kind = f"the stream {dataset.source.identity}"
    samples = f"cached: what {kind} reads"
    if opened.split is not None:
        samples = opened.split.report
    elif augments:
        names = ", ".join(name_of(cast(Any, augment)) for augment in augments)
        samples = f"{samples}; redone at every serve: {names}"
    if opened.decoding:
        samples = f"{samples}; {opened.decoding}"
    return samples if len(augments) < 2 else f"{samples}; {len(augments)} views a serve"


def _describe_readers(setup: PipelineSetup) -> str:
    workers = setup.workers
    if not workers.count:
        return "read by the loop itself, nothing ahead (workers=0)"
    kind = "process" if workers.kind == "process" else "thread"
    if workers.count > 1:
        kind = {"process": "processes", "thread": "threads"}[kind]
    return f"read by {workers.count} {kind}{_in_brackets(workers.because)}"


def _in_brackets(why: str) -> str:
    return f" ({why})" if why else ""


class Announcement:
    """Logs the summary of one loader once, and again if its buffer takes much of the memory."""

    def __init__(self, tuned: bool) -> None:
        self.adopted: AdoptedArguments | None = None
        self._tuned = tuned
        self._announced = False
        self._largest = 0
        """The bytes of the largest buffer so far."""

    def announce(
        self, setup: PipelineSetup, order: AnyOrder, serving: Serving, buffer: BufferSize | None
    ) -> None:
        """`serving` is how the pass will be served. `buffer` None: it has none."""
        too_large = ""
        known = None if buffer is None or buffer.about else buffer.nbytes
        if buffer and known and setup.opened.decoded is None and known > self._largest:
            self._largest = known
            too_large = buffer.too_large(free_memory() // launched_ranks())
        if not self._announced:
            self._announced = True
            adopted = self.adopted
            notes = (*(adopted.notes if adopted else ()), order.uncompared_draws, too_large)
            parts = _parts_of(setup, serving, self._tuned, order, adopted, buffer)
            level = logging.WARNING if any(notes) else logging.INFO
            log.log(level, "%s", "; ".join(filter(None, (*parts, *notes))))
        elif too_large:
            log.warning("%s", too_large)


def log_choice(choice: Choice, served: int) -> None:
    """Log which reuse is recommended, where `served` is the present one."""
    log.log(
        logging.INFO if choice.reuse == served else logging.WARNING,
        "reuse %d is recommended, %d is served: %s; loader.set_reuse(loader.recommended_reuse)"
        " between two passes follows it",
        choice.reuse, served, choice.reason,
    )  # fmt: skip
