"""What a loader says of itself, once: what is cached and redone, the seed, who reads, its rank.

made from a DataLoader   said at once
made by hand             said when its first pass begins

It is a WARNING if something has no effect or cannot be compared, and if the buffer takes much of
the memory, else at level INFO.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, cast

from loaders.adopting.native_folder import NativeFolder
from loaders.adopting.torchvision_steps import name_of
from loaders.arguments import AdoptedArguments, Serving
from loaders.batching.batches import each_view
from loaders.opened_dataset import OpenedDataset
from loaders.options import LoaderOptions, WorkerKind
from loaders.order.tuning import Choice
from loaders.passes.own_batches import OwnOrder
from loaders.passes.rank_order import RankOrder
from loaders.passes.stream_order import StreamOrder
from loaders.passes.torch_pass import is_made_by_torch
from loaders.pipeline import PipelineSetup
from loaders.stats import BufferSize
from loaders.streams.streamed_samples import StreamedSamples
from loaders.workers.machine import free_memory, launched_ranks

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
    buffer: str
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
    buffer: BufferSize | None,
) -> Told:
    """`tuned`: whether another reuse may be recommended. `adopted`: what came from a DataLoader."""
    workers, opened = setup.workers, setup.opened
    reuse = (
        f"{serving.reuse} (auto recommends one when it is sure)" if tuned else f"{serving.reuse}"
    )
    unknown = order.unknown_draws
    samples = _samples(opened, setup.options)
    if isinstance(order, OwnOrder):
        samples = f"made as the DataLoader makes them, which has {order.batching.why}"
    elif not tuned and is_made_by_torch(setup, serving.reuse):
        samples = "made by torch's DataLoader: nothing is reused, cached or redone"
    return Told(
        samples,
        f"{reuse}" if serving.reaugment else f"{reuse} with the same draws",
        setup.options.cache.kind if setup.options.cache else "",
        "" if buffer is None or opened.decoded is not None else buffer.said,
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
        told.buffer,
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
    """Says the summary of one loader, once, and once if its buffer takes much of the memory."""

    def __init__(self, tuned: bool) -> None:
        self.adopted: AdoptedArguments | None = None
        self._tuned = tuned
        self._said = False
        self._largest = 0
        """The bytes of the largest buffer so far."""

    def say(
        self, setup: PipelineSetup, order: AnyOrder, serving: Serving, buffer: BufferSize | None
    ) -> None:
        """`serving` is how the pass will be served. `buffer` None: it has none."""
        too_large = ""
        if buffer is not None and setup.opened.decoded is None and buffer.exceeds(self._largest):
            self._largest = buffer.nbytes or 0
            too_large = buffer.too_large(free_memory() // launched_ranks())
        if not self._said:
            self._said = True
            told = told_of(setup, serving, self._tuned, order, self.adopted, buffer)
            told = replace(told, notes=(*told.notes, *filter(None, [too_large])))
            log.log(logging.WARNING if told.notes else logging.INFO, "%s", summary(told))
        elif too_large:
            log.warning("%s", too_large)


def tell_choice(choice: Choice, served: int) -> None:
    """Say which reuse is recommended, where `served` is the present one."""
    log.log(
        logging.INFO if choice.reuse == served else logging.WARNING,
        "reuse %d is recommended, %d is served: %s; loader.set_reuse(loader.recommended_reuse)"
        " between two passes follows it",
        choice.reuse, served, choice.reason,
    )  # fmt: skip
