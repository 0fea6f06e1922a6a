"""What a loader did so far, and which samples its latest batch was made of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEMORY = ("buffer_bytes", "batch_bytes", "cache_bytes")
"""These are measured when the stats are read."""
LOGGED = (
    "decoded", "cached", "reused", "served", "extra_decodes", "skipped",
    "stall_seconds", "serve_seconds", "decode_seconds", *MEMORY, "mean_age",
)  # fmt: skip
"""All stats that are a number each."""


@dataclass(frozen=True, slots=True)
class PassAges:
    """How old the samples were that the latest pass served, in batches since their first serve."""

    total: int = 0
    serves: int = 0

    def with_batch(self, total: int, serves: int, begins: bool) -> "PassAges":
        """These and the ages of one more batch. `begins`: it is the first one of a pass."""
        if begins:
            return PassAges(total, serves)
        return PassAges(self.total + total, self.serves + serves)


@dataclass(frozen=True, slots=True)
class LoaderStats(Mapping[str, Any]):
    """Counters since the loader was made. A resumed loader goes on counting."""

    serves: tuple[int, ...] = ()
    """The histogram of reuse: how many serves were a sample's first in its pass, its second, ..."""
    cached: int = 0
    """First serves of samples that came from the decoded cache."""
    extra_decodes: int = 0
    """Decodes that served nothing new: refills after a resume, and for a pass that was left."""
    skipped: int = 0
    """Samples that could not be read and were replaced (on_error="skip")."""
    stall_seconds: float = 0.0
    """The time that the consumer waited for batches."""
    serve_seconds: float = 0.0
    """The time that gathering and augmenting batches took, on all threads together."""
    decode_seconds: float = 0.0
    """The time that all workers together spent reading and decoding."""
    buffer_bytes: int = 0
    """The memory of the slots."""
    batch_bytes: int = 0
    """The memory of batches that are made, wait, or are used, or that waits for batches."""
    cache_bytes: int = 0
    """The memory or disk space of the decoded cache."""
    ages: PassAges = PassAges()
    decoders: tuple[tuple[str, int], ...] = ()
    """Who decoded pictures of files in this process, and how many: ("JPEG natively", 120)."""

    @property
    def decoded(self) -> int:
        """First serves of samples that were decoded for it."""
        return sum(self.serves[:1]) - self.cached

    @property
    def reused(self) -> int:
        """Serves of samples that were in the buffer already."""
        return sum(self.serves[1:])

    @property
    def served(self) -> int:
        """Serves of samples, all together: served = decoded + cached + reused."""
        return sum(self.serves)

    @property
    def mean_age(self) -> float:
        """The mean number of batches since a sample's first serve, over the latest pass."""
        return self.ages.total / self.ages.serves if self.ages.serves else 0.0

    def saved(self) -> dict[str, Any]:
        """These counters as a saved state has them, as plain values."""
        ages = {"pass_ages": self.ages.total, "pass_serves": self.ages.serves}
        return {**{name: self[name] for name in LOGGED}, **ages, "serves": list(self.serves)}

    @classmethod
    def from_state(cls, saved: dict[str, Any]) -> "LoaderStats":
        """The counters of a saved state."""
        counters = {each.name: saved[each.name] for each in fields(cls) if each.name in LOGGED}
        ages = PassAges(saved["pass_ages"], saved["pass_serves"])
        return cls(**counters, ages=ages, serves=tuple(saved["serves"]))

    def read_once(self, samples: int, seconds: float, waited: float, begins: bool) -> "LoaderStats":
        """These counters with a batch of samples that a DataLoader read in `seconds`. `begins`: it
        is the first one of a pass."""
        first, *others = self.serves or (0,)
        return replace(
            self,
            decode_seconds=self.decode_seconds + seconds,
            stall_seconds=self.stall_seconds + waited,
            serves=(first + samples, *others),
            ages=self.ages.with_batch(0, samples, begins),
        )

    def with_batch(
        self, info: "BatchInfo", cached: int, seconds: float, ages: int, begins: bool
    ) -> "LoaderStats":
        """With one more batch, made in `seconds`, `cached` samples of which came from the cache,
        and whose ages sum up to `ages`. `begins`: it is the first one of a pass."""
        counts = np.bincount(info.serves, minlength=len(self.serves))
        counts[: len(self.serves)] += np.array(self.serves, dtype=np.int64)
        return replace(
            self,
            cached=self.cached + cached,
            serve_seconds=self.serve_seconds + seconds,
            serves=tuple(counts.tolist()),
            ages=self.ages.with_batch(ages, len(info.ids), begins),
        )

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter((*LOGGED, "serves", "decoders"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """The samples that a batch was made of."""

    pass_index: int
    batch_index: int
    positions: NDArray[np.int64]
    """Their positions in the order in which the pass decodes."""
    ids: NDArray[np.int64]
    """Their numbers in the data set."""
    serves: NDArray[np.int64]
    """The number of each serve: 0 for a sample's first in the pass, 1 for its second, ..."""
    draws: NDArray[np.int64]
    """The serve whose random numbers each augmentation used: the first one, unless reaugmented."""


MUCH = 0.25
"""A buffer that takes more than this share of the free memory is warned of."""


@dataclass(frozen=True, slots=True)
class BufferSize:
    """The slots of the reuse buffer."""

    batches: int
    nbytes: int | None
    """None: nobody has read a sample yet."""
    about: bool = False
    """Whether that is what is expected before the slots are made."""

    @property
    def description(self) -> str:
        about = "about " if self.about else ""
        size = "" if not self.nbytes else f" ({about}{format_bytes(self.nbytes)})"
        return f"a buffer of {self.batches} batches{size}"

    def too_large(self, free: int) -> str:
        """The warning, if it takes much of the `free` bytes. Empty: it does not."""
        if self.nbytes is None or self.nbytes <= MUCH * free:
            return ""
        return (
            f"the buffer takes {format_bytes(self.nbytes)}, more than a quarter of the memory that"
            f" is free ({format_bytes(free)}): keep smaller pictures (size= of picture_folder or"
            " TarShards, or a Resize at the transform's beginning), or give buffer_bytes= or a"
            " smaller buffer_batches="
        )


def format_bytes(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
