"""What a loader did so far, and of whom its latest batch was made."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LoaderStats(Mapping[str, Any]):
    """Counters since the loader was made (a resumed loader goes on counting).

    served = decoded + cached + reused.
    """

    decoded: int = 0
    """First serves of samples that were decoded for it."""
    cached: int = 0
    """First serves of samples that came from the decoded cache."""
    reused: int = 0
    """Serves that needed neither."""
    served: int = 0
    extra_decodes: int = 0
    """Decodes beyond those: refills after a resume, look-ahead of a pass that was left early."""
    skipped: int = 0
    """Samples that could not be read and were replaced (on_error="skip")."""
    stall_seconds: float = 0.0
    """Time the consumer waited for a batch."""
    serve_seconds: float = 0.0
    """Time spent gathering and augmenting batches, on whatever thread."""
    decode_seconds: float = 0.0
    """Time the workers spent reading and decoding, all together."""
    buffer_bytes: int = 0
    """Memory of the slots."""
    batch_bytes: int = 0
    """Memory of batches: being made, waiting, with the consumer, or waiting to be used again."""
    cache_bytes: int = 0
    mean_age: float = 0.0
    """Batches between a sample's first serve and a serve of it, over the latest pass."""
    serves: tuple[int, ...] = ()
    """Reuse histogram: how many serves were a sample's first in its pass, its second, ..."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Who a batch was made of."""

    pass_index: int
    batch_index: int
    positions: NDArray[np.int64]
    """In the order in which the pass decodes."""
    ids: NDArray[np.int64]
    serves: NDArray[np.int64]
    draws: NDArray[np.int64]
    """The serve that each augmentation was drawn for: the first one, unless reaugmented."""
