"""The decoded cache: samples that were decoded in the first pass are kept, in RAM or on disk.

    pass 1   decode ---> slot of the slab          later passes, later runs   read ---> slot
               '--offer--> cache, while it fits                                 '- None: decode

Nothing is ever evicted: a pass reads every sample once in a random order, so LRU and FIFO would
evict what is needed next, and a fixed set gives the same share of hits in every pass (CoorDL's
MinIO, VLDB 2021, section 4.1). A sample is kept whole and unchanged or not at all.

Arrays that `read` returns are views of the cache's own memory: DO NOT WRITE TO THEM. On disk a
write is a segmentation fault, in RAM it would change the cache. They stay valid after `close`.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, final

import torch

from loaders.cache.cache_records import (
    Packed,
    RecordLayouts,
    pack,
    unpack,
    values_to_text,
)
from loaders.closing import ClosedAtEnd

log = logging.getLogger(__name__)

CacheKind = Literal["ram", "disk"]

RAM_ENTRY_BYTES = 640
"""The overhead of a sample in RAM: 380 to 630 bytes were measured."""


class DecodedCache(ClosedAtEnd, ABC):
    """Keeps samples by id, each as the list of its leaves: CPU tensors, numpy arrays and scalars,
    and plain values (numbers, strings, bytes, None). Any thread may call any method."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: dict[int, Any] = {}
        self._in_progress: set[int] = set()
        """The samples that threads are adding now."""
        self._layouts = RecordLayouts()
        self._warned_unkept = False

    @abstractmethod
    def read(self, sample_id: int) -> list[Any] | None:
        """The leaves of a sample; arrays are views that must not be written to. None: the cache
        does not have it."""

    @abstractmethod
    def offer(self, sample_id: int, leaves: Sequence[Any]) -> bool:
        """Keep a copy, if it fits within the limit and the cache does not have it yet. Returns
        whether it is kept. `read` does not find the sample before it is complete."""

    @abstractmethod
    def refresh(self) -> None:
        """Find what other processes have kept. Call it between two passes, never during one."""

    def ids(self) -> list[int]:
        """The samples that `read` would find."""
        return list(self._kept)

    @property
    def entries(self) -> int:
        """The number of samples that `read` would find."""
        return len(self._kept)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes in use, with all overhead. They never exceed the limit."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. After this, nothing is found or kept. It is safe to call again."""

    def _pack(self, sample_id: int, leaves: Sequence[Any]) -> Packed | None:
        packed = pack(leaves, self._layouts)
        if packed is None and not self._warned_unkept:
            self._warned_unkept = True
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            log.warning(
                "sample %d and others like it are not kept in the decoded cache: a part of it is"
                " neither an array in CPU memory nor a plain value (parts: %s); return tensors,"
                " arrays, numbers or strings from the data set, or leave the cache off",
                sample_id,
                kinds,
            )
        return packed


@final
class RamCache(DecodedCache):
    """Keeps samples in this process's memory, each in one allocation of exactly its size."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._lock = threading.Lock()
        self._nbytes = 0
        self._closed = False

    def read(self, sample_id: int) -> list[Any] | None:
        kept = self._kept.get(sample_id)
        return None if kept is None else unpack(kept[0], 0, kept[1], kept[2])

    def offer(self, sample_id: int, leaves: Sequence[Any]) -> bool:
        if sample_id in self._kept or self.limit_bytes - self._nbytes < RAM_ENTRY_BYTES:
            return False
        packed = self._pack(sample_id, leaves)
        if packed is None:
            return False
        size = packed.layout.nbytes + len(values_to_text(packed.values)) + RAM_ENTRY_BYTES
        with self._lock:
            taken = sample_id in self._kept or sample_id in self._in_progress
            if taken or self._closed or self._nbytes + size > self.limit_bytes:
                return False
            self._in_progress.add(sample_id)
            self._nbytes += size
        kept = None
        try:
            # The consumer may be in inference mode, whose tensors cannot be used outside it.
            with torch.inference_mode(False):
                memory = torch.empty(packed.layout.nbytes, dtype=torch.uint8)
            record = memory.numpy()
            for start, row in packed.rows_by_start():
                record[start : start + len(row)] = row
            kept = memory, packed.layout, packed.values
        finally:
            with self._lock:
                self._in_progress.discard(sample_id)
                if kept is None or self._closed:
                    self._nbytes -= size
                else:
                    self._kept[sample_id] = kept
        return not self._closed

    def refresh(self) -> None:
        """No other process writes into this memory."""

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._kept = {}
            self._nbytes = 0
