"""What a user asked a loader for, in groups. `loaders.arguments` checks them.

OrderOptions      which samples come next, and how many wait in the buffer
DecodingOptions   how a sample is read and decoded
WorkerOptions     who does it: how many workers, and of which kind
CacheOptions      whether decoded samples are kept, and where
BatchOptions      how samples become batches
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from loaders.backends import Backend
from loaders.batches import AugmentOn, Augments, Collate
from loaders.cache.cache import CacheKind
from loaders.joint_parts import PartKinds
from loaders.order.reuse import Mode
from loaders.pixels.augmentation import Augmentation
from loaders.workers.processes import StartMethod
from loaders.workers.reader import OnError

WorkerKind = Literal["auto", "thread", "process"]


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """Which samples are served in which order, from a buffer of which size."""

    mode: Mode
    shuffle: bool
    drop_last: bool
    sampler: Any
    buffer_batches: int
    buffer_bytes: int | None
    samples_per_pass: int | None = None
    """Of a stream. None: a pass ends where the stream does."""


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """How a sample is read and decoded."""

    backend: Backend
    once: Augmentation | None
    on_error: OnError


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How many workers read samples, and whether they are threads or processes."""

    count: int
    kind: WorkerKind
    start_method: StartMethod | None
    timeout: float | None = None
    """Seconds that a sample may take. None: as long as it takes."""
    init: Callable[[int], object] | None = None
    """Called in each worker process with its number, before it reads."""
    because: str = ""
    """Why they are of this kind, where the loader chose it."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Where decoded samples are kept. `kind` None: they are not kept."""

    kind: CacheKind | None
    limit_bytes: int | None
    folder: Path | str | None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How samples become batches, and where the batches go."""

    augment: Augments | None
    collate: Collate | None
    device: torch.device | str | None
    augment_on: AugmentOn
    pin_memory: bool
    views: int = 1
    """How many views of a sample each serve has, where `augment` lists none."""
    parts: PartKinds | None = None
    """What goes with the picture, and how."""


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """All of them."""

    order: OrderOptions
    decoding: DecodingOptions
    workers: WorkerOptions
    cache: CacheOptions
    batches: BatchOptions
