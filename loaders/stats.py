"""What a loader did so far, and which samples its latest batch was made of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEMORY = ("buffer_bytes", "batch_bytes", "cache_bytes")
"""What of the stats is no counter, but what is taken at the moment."""
NOT_LOGGED = ("serves", "pass_ages", "pass_serves", "decoders")
"""What of the stats is no counter of its own: loggers are told what is made of it."""


@dataclass(frozen=True, slots=True)
class LoaderStats(Mapping[str, Any]):
    """Counters since the loader was made. A resumed loader goes on counting.

    It holds that served = decoded + cached + reused.
    """

    decoded: int = 0
    """First serves of samples that were decoded for it."""
    cached: int = 0
    """First serves of samples that came from the decoded cache."""
    reused: int = 0
    """Serves of samples that were in the buffer already."""
    served: int = 0
    """Serves of samples, all together."""
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
    mean_age: float = 0.0
    """The mean number of batches since a sample's first serve, over the latest pass."""
    pass_ages: int = 0
    """The sum of these ages."""
    pass_serves: int = 0
    """The number of these serves."""
    serves: tuple[int, ...] = ()
    """The histogram of reuse: how many serves were a sample's first in its pass, its second, ..."""
    decoders: tuple[tuple[str, int], ...] = ()
    """Who decoded pictures of files in this process, and how many: ("JPEG natively", 120)."""

    def saved(self) -> dict[str, Any]:
        """These counters as a saved state has them, as plain values."""
        kept = {name: value for name, value in self.items() if name != "decoders"}
        return {**kept, "serves": list(self.serves)}

    @classmethod
    def from_state(cls, saved: dict[str, Any]) -> "LoaderStats":
        """The counters of a saved state."""
        return cls(**{**saved, "serves": tuple(saved["serves"])})

    def read_once(self, samples: int, seconds: float, waited: float, begins: bool) -> "LoaderStats":
        """These counters with a batch of samples that a DataLoader read in `seconds`. `begins`: it
        is the first one of a pass."""
        first, *others = self.serves or (0,)
        return replace(
            self,
            decoded=self.decoded + samples,
            served=self.served + samples,
            decode_seconds=self.decode_seconds + seconds,
            stall_seconds=self.stall_seconds + waited,
            serves=(first + samples, *others),
            mean_age=0.0,
            pass_ages=0,
            pass_serves=samples if begins else self.pass_serves + samples,
        )

    def with_batch(
        self, info: "BatchInfo", cached: int, seconds: float, ages: int, begins: bool
    ) -> "LoaderStats":
        """With one more batch, made in `seconds`, `cached` samples of which came from the cache,
        and whose ages sum up to `ages`. `begins`: it is the first one of a pass."""
        served, fresh = len(info.ids), int((info.serves == 0).sum())
        counts = np.bincount(info.serves, minlength=len(self.serves))
        counts[: len(self.serves)] += np.array(self.serves, dtype=np.int64)
        pass_ages = ages if begins else self.pass_ages + ages
        pass_serves = served if begins else self.pass_serves + served
        return replace(
            self,
            decoded=self.decoded + fresh - cached,
            cached=self.cached + cached,
            reused=self.reused + served - fresh,
            served=self.served + served,
            serve_seconds=self.serve_seconds + seconds,
            serves=tuple(counts.tolist()),
            pass_ages=pass_ages,
            pass_serves=pass_serves,
            mean_age=pass_ages / pass_serves,
        )

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


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
        """What to say if it takes much of the `free` bytes. Empty: it does not."""
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
