"""What a loader says of itself, once: what is cached and redone, the seed, who reads, its rank.

made from a DataLoader   said at once
made by hand             said when its first pass begins

It is a WARNING if something has no effect or cannot be compared, else at level INFO.
"""

import logging
from dataclasses import dataclass
from typing import Any, cast

from loaders.adopted import AdoptedArguments
from loaders.adopting.native_folder import NativeFolder
from loaders.adopting.torchvision_steps import name_of
from loaders.arguments import Serving
from loaders.batches import each_view
from loaders.opened_dataset import OpenedDataset
from loaders.options import LoaderOptions, WorkerKind
from loaders.own_batches import OwnOrder
from loaders.pipeline import PipelineSetup
from loaders.rank_order import RankOrder
from loaders.stream_order import StreamOrder
from loaders.streams.streamed_samples import StreamedSamples

log = logging.getLogger(__name__)

AnyOrder = RankOrder | StreamOrder | OwnOrder


@dataclass(frozen=True, slots=True)
class Told:
    """What the summary tells."""

    samples: str
    """What is cached and what is redone."""
    reuse: str
    cache: str
    """Where decoded samples stay from pass to pass. Empty: nowhere."""
    seed: int
    seed_from: str
    in_memory: bool
    """Whether nothing is read, for it lies decoded in memory."""
    workers: int
    worker_kind: WorkerKind
    kind_because: str
    rank: int | None
    """None: torch.distributed is asked when a pass begins."""
    world_size: int | None
    notes: tuple[str, ...] = ()
    """What was given in vain, and what cannot be compared, each in a sentence."""
    whole_batches: bool = False
    """Whether each batch has all samples of a rank."""


def told_of(
    setup: PipelineSetup,
    serving: Serving,
    tuned: bool,
    order: AnyOrder,
    adopted: AdoptedArguments | None,
) -> Told:
    """`tuned`: whether the reuse is chosen by measuring. `adopted`: what came from a DataLoader."""
    workers, opened = setup.workers, setup.opened
    reuse = "auto" if tuned else str(serving.reuse)
    unknown = order.unknown_draws
    return Told(
        _samples(opened, setup.options),
        reuse if serving.reaugment else f"{reuse} with the same draws",
        setup.options.cache.kind if setup.options.cache else "",
        setup.seed,
        adopted.seed_from if adopted else "",
        opened.decoded is not None,
        workers.count,
        workers.kind,
        workers.because,
        order.rank if order.known else None,
        order.world_size if order.known else None,
        (*(adopted.notes if adopted else ()), *([unknown] if unknown else ())),
        serving.batch_size == order.share,
    )


def _samples(opened: OpenedDataset, options: LoaderOptions) -> str:
    augments = each_view(options.augment)
    dataset = opened.dataset.folder if isinstance(opened.dataset, NativeFolder) else opened.dataset
    kind = type(dataset).__name__
    if isinstance(dataset, StreamedSamples):
        kind = f"the stream {dataset.source.identity}"
    said = f"cached: what {kind} reads"
    if opened.split is not None:
        said = opened.split.report
    elif augments:
        names = ", ".join(name_of(cast(Any, augment)) for augment in augments)
        said = f"{said}; redone at every serve: {names}"
    if opened.decoding:
        said = f"{said}; {opened.decoding}"
    return said if len(augments) < 2 else f"{said}; {len(augments)} views a serve"


def summary(told: Told) -> str:
    """One line, with its parts in a fixed order."""
    kind = {"process": "processes"}.get(told.worker_kind, "threads")
    kind = told.worker_kind if told.workers == 1 else kind
    readers = f"read by {told.workers} {kind}{_because(told.kind_because)}"
    if not told.workers:
        readers = "read by the loop itself, nothing ahead (workers=0)"
    ranks = "ranks as torch.distributed says"
    if told.world_size is not None:
        ranks = f"rank {told.rank} of {told.world_size}"
    parts = [
        told.samples,
        f"reuse {told.reuse}",
        f"kept in the cache ({told.cache})" if told.cache else "",
        "each batch has all samples" if told.whole_batches else "",
        f"seed {told.seed}{_because(told.seed_from)}",
        "read by nobody: it lies decoded in memory" if told.in_memory else readers,
        ranks,
        *told.notes,
    ]
    return "; ".join(filter(None, parts))


def _because(why: str) -> str:
    return f" ({why})" if why else ""


class Announcement:
    """Says the summary of one loader, once."""

    def __init__(self, tuned: bool) -> None:
        self.adopted: AdoptedArguments | None = None
        self._tuned = tuned
        self._said = False

    def say(
        self, setup: PipelineSetup, order: RankOrder | StreamOrder | OwnOrder, serving: Serving
    ) -> None:
        """`serving` is how the first pass will be served."""
        if self._said:
            return
        self._said = True
        told = told_of(setup, serving, self._tuned, order, self.adopted)
        log.log(logging.WARNING if told.notes else logging.INFO, "%s", summary(told))
