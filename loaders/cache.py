"""The decoded cache: what was decoded in the first pass stays, in RAM or on disk.

    pass 1   decode ---> slot of the slab          later passes, later runs   read ---> slot
               '--offer--> cache, while it fits                                 '- None: decode

Nothing is ever evicted. A pass asks for every sample exactly once in a new random order, so the
sample that was used last is the one needed furthest in the future: LRU, FIFO and the like throw out
what they would have hit, down to no hit at all (CoorDL's MinIO, VLDB 2021, section 4.1). A fixed
set of residents hits its share in every pass, costs no writes after the first, and who is in it
does not matter. A sample is kept whole and unchanged or not at all: pixels that come out are those
that went in, so whether a pass hits or misses changes its speed only.

Arrays that `read` returns lie in the cache's own memory: NOBODY MAY WRITE TO THEM. numpy's are
marked so. torch has no such mark: on disk a write is a segmentation fault, in RAM it would change
the cache. Copy them (a slot of the slab is a copy). They stay valid after `close`.
"""

import logging
import re
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, final, get_args

import torch

from loaders.cache_files import Catalogue, OwnFiles, Place, Segment, data_path
from loaders.cache_index import DropLine, RecordLine, record_line
from loaders.cache_records import (
    Layout,
    Layouts,
    Packed,
    aligned,
    pack,
    unpack,
    values_to_text,
)
from loaders.errors import CacheError
from loaders.fingerprint import fingerprint

__all__ = ["DecodedCache", "DiskCache", "RamCache", "fingerprint", "open_cache"]

log = logging.getLogger(__name__)

CacheKind = Literal["ram", "disk"]

# What Python and torch keep about a sample in RAM beside its bytes, measured: 380 to 630.
RAM_ENTRY_BYTES = 640


def open_cache(
    kind: Literal["ram", "disk"],
    limit_bytes: int,
    folder: Path | None,
    fingerprint: str,
    writer: int,
) -> "DecodedCache":
    """`folder`: where caches on disk lie, one sub-folder a fingerprint. `limit_bytes`: of this
    process in RAM; of all writers of a fingerprint together on disk. `writer`: the rank."""
    if limit_bytes < 1:
        raise ValueError(f"limit_bytes must be at least 1, not {limit_bytes}")
    if kind == "ram":
        return RamCache(limit_bytes)
    if kind != "disk":
        raise ValueError(f"kind must be 'ram' or 'disk', not {kind!r}")
    if folder is None:
        raise ValueError("a cache on disk needs a folder")
    return DiskCache(folder, limit_bytes, fingerprint, writer)


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """What a user asked for."""

    kind: CacheKind
    limit_bytes: int | None
    folder: Path | None

    def __post_init__(self) -> None:
        if self.kind not in get_args(CacheKind):
            raise ValueError(
                f"cache must be one of {', '.join(get_args(CacheKind))}, not {self.kind!r}"
            )
        if self.limit_bytes is None:
            raise ValueError(
                f'cache="{self.kind}" needs cache_bytes: how much it may take, in bytes'
            )
        if (self.folder is None) == (self.kind == "disk"):
            raise ValueError(
                'cache="disk" needs cache_dir, the folder to keep it in'
                if self.kind == "disk"
                else f"cache_dir={self.folder} has no effect: a cache in RAM has no folder"
            )

    def open(self, dataset: Any, writer: int) -> "DecodedCache":
        print_ = fingerprint(dataset) if self.kind == "disk" else ""
        return open_cache(self.kind, self.limit_bytes or 0, self.folder, print_, writer)


class DecodedCache(ABC):
    """Samples by id, as `loaders.leaves` lists their leaves: CPU tensors, numpy arrays
    and scalars, and plain values (numbers, strings, bytes, None). Any thread may call anything."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._layouts = Layouts()
        self._told_unkept = False

    @abstractmethod
    def read(self, sample_id: int) -> list[Any] | None:
        """The leaves of a sample, arrays as views that nobody may write to; None: not here."""

    @abstractmethod
    def offer(self, sample_id: int, leaves: Sequence[Any]) -> bool:
        """Keep a copy if it fits in what is left of the limit and is not here yet. No `read` sees
        it before it is whole."""

    @abstractmethod
    def refresh(self) -> None:
        """Find what other processes have kept since; between two passes, not in them."""

    @property
    @abstractmethod
    def entries(self) -> int:
        """Samples that `read` would find."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes taken, all overhead included. Never grows above the limit."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; safe to call again. From then on nothing is found or kept."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pack(self, sample_id: int, leaves: Sequence[Any]) -> Packed | None:
        packed = pack(leaves, self._layouts)
        if packed is None and not self._told_unkept:
            self._told_unkept = True
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            log.warning(
                "sample %d is not kept in the decoded cache, nor are others like it: it has a part"
                " that is neither an array in CPU memory nor a plain value (parts: %s)",
                sample_id,
                kinds,
            )
        return packed


@final
class RamCache(DecodedCache):
    """In this process's memory, one allocation of exactly its size a sample."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[torch.Tensor, Layout, tuple[Any, ...]]] = {}
        self._coming: set[int] = set()
        self._nbytes = 0
        self._closed = False

    def read(self, sample_id: int) -> list[Any] | None:
        found = self._kept.get(sample_id)
        return None if found is None else unpack(found[0], 0, found[1], found[2])

    def offer(self, sample_id: int, leaves: Sequence[Any]) -> bool:
        if sample_id in self._kept or self.limit_bytes - self._nbytes < RAM_ENTRY_BYTES:
            return False
        packed = self._pack(sample_id, leaves)
        if packed is None:
            return False
        size = packed.layout.nbytes + len(values_to_text(packed.values)) + RAM_ENTRY_BYTES
        with self._lock:
            taken = sample_id in self._kept or sample_id in self._coming
            if taken or self._closed or self._nbytes + size > self.limit_bytes:
                return False
            self._coming.add(sample_id)
            self._nbytes += size
        kept = None
        try:
            # The consumer may be in inference mode, whose tensors nobody may use outside it.
            with torch.inference_mode(False):
                memory = torch.empty(packed.layout.nbytes, dtype=torch.uint8)
            record = memory.numpy()
            for start, row in packed.placed():
                record[start : start + len(row)] = row
            kept = (memory, packed.layout, packed.values)
        finally:
            with self._lock:
                self._coming.discard(sample_id)
                if kept is None or self._closed:
                    self._nbytes -= size
                else:
                    self._kept[sample_id] = kept
        return not self._closed

    def refresh(self) -> None:
        """Nobody else writes here."""

    @property
    def entries(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._kept = {}
            self._nbytes = 0


@final
class DiskCache(DecodedCache):
    """In files that later runs, and the other ranks' `refresh`, find again (`cache_files`).

    A record that another process wrote is verified when it is first read: a bad one is dropped for
    good and its sample decoded (and offered) again. For one process: a forked child must not use
    it. Files that somebody cuts while they are mapped, and sectors that cannot be read, end the
    process (SIGBUS)."""

    def __init__(self, folder: Path, limit_bytes: int, fingerprint: str, writer: int) -> None:
        super().__init__(limit_bytes)
        self.folder = folder / fingerprint
        # Its condition: no record is on its way to the disk.
        self._lock = threading.Condition()
        self._catalogue = Catalogue(self.folder, fingerprint, writer, self._layouts)
        self._kept = self._catalogue.places
        self._coming: set[int] = set()
        self._end = 0
        self._stopped = False
        self._closed = False
        if not re.fullmatch(r"\w[\w.-]*", fingerprint):
            raise ValueError(f"fingerprint must be a folder's name, not {fingerprint!r}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._own = OwnFiles(self.folder, writer, fingerprint, limit_bytes)
            self._open()
        except OSError as error:
            raise CacheError(
                f"no decoded cache in {self.folder}: {error}; give a folder on a disk with room"
                " that this user may write to, or cache in RAM"
            ) from error

    def read(self, sample_id: int) -> list[Any] | None:
        place = self._kept.get(sample_id)
        if place is None:
            return None
        place.segment.fetch(place.at, place.layout.nbytes)
        if not (place.checked or self._verify(sample_id, place)):
            return None
        return unpack(place.segment.memory, place.at, place.layout, place.values)

    def offer(self, sample_id: int, leaves: Sequence[Any]) -> bool:
        if sample_id in self._kept or self._stopped or self._closed:
            return False
        packed = self._pack(sample_id, leaves)
        if packed is None:
            return False
        with self._lock:
            taken = sample_id in self._kept or sample_id in self._coming
            if taken or self._stopped or self._closed:
                return False
            line = record_line(sample_id, self._own.tail, 0, packed)
            room = self._take_room(packed.layout.nbytes, len(line.encoded()))
            if room is None:
                return False
            self._coming.add(sample_id)
        segment, offset = room
        place = None
        try:
            crc = packed.crc()
            self._own.write(offset, packed.placed())
            line = record_line(sample_id, offset, crc, packed)
            at = offset - segment.start
            place = Place(segment, at, crc, packed.layout, packed.values, checked=True)
        except OSError as error:
            self._stop(error)
        finally:
            with self._lock:
                self._coming.discard(sample_id)
                if place is not None and self._append(line):
                    self._end = max(self._end, offset + aligned(packed.layout.nbytes))
                    self._kept[sample_id] = place
                self._lock.notify_all()
        return sample_id in self._kept

    def refresh(self) -> None:
        with self._lock:
            if not self._closed:
                self._own.look_for_room()
                self._catalogue.admit_others()

    @property
    def entries(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Of all writers: this one's exactly, the others' as they were when room was last taken."""
        return self._own.others + self._own.used

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._coming)
            self._kept.clear()
            self._own.close(self._end)

    # ---- opening ----------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self._own.index.look()
            self._end = self._catalogue.admit(self._own.index, self._own.whole())
            torn = self._own.begin_after(self._end)
            self._catalogue.admit_others()
        except BaseException:
            self._own.close(None)
            raise
        if torn:
            log.info(
                "%s: cut off %d bytes that no record ends in: the last run did not close it",
                data_path(self.folder, self._own.writer),
                torn,
            )
        log.info(
            "decoded cache %s: %d samples, %d of %d bytes",
            self.folder,
            self.entries,
            self.nbytes,
            self.limit_bytes,
        )
        if self.nbytes > self.limit_bytes:
            log.warning(
                "decoded cache %s takes %d bytes already, the limit is %d: nothing is added and"
                " nothing deleted; delete the folder to make it smaller",
                self.folder,
                self.nbytes,
                self.limit_bytes,
            )
        self._name_strangers()

    def _name_strangers(self) -> None:
        indexes = self.folder.parent.glob("*/writer-*.index")
        strangers = sorted({path.parent.name for path in indexes} - {self.folder.name})
        if strangers:
            log.info(
                "%s also holds decoded caches of other data or other settings: %s; delete those"
                " that no run needs",
                self.folder.parent,
                ", ".join(strangers),
            )

    # ---- failing ----------------------------------------------------------------------------

    def _verify(self, sample_id: int, place: Place) -> bool:
        end = place.at + place.layout.nbytes
        if zlib.crc32(place.segment.memory.numpy()[place.at : end].data) == place.crc:
            place.checked = True
            return True
        with self._lock:
            if self._closed or self._kept.get(sample_id) is not place:
                return False  # another thread has found it too
            del self._kept[sample_id]
            writer, offset = place.key
            self._catalogue.dropped.add(place.key)
            log.warning(
                "%s: sample %d at byte %d has another checksum than it was written with: dropped,"
                " and decoded again",
                data_path(self.folder, writer),
                sample_id,
                offset,
            )
            line = DropLine(writer, offset)
            if not self._stopped and self._take_room(0, len(line.encoded())):
                self._append(line)
        return False

    def _take_room(self, nbytes: int, line: int) -> tuple[Segment, int] | None:
        try:
            return self._own.reserve(nbytes, line)
        except OSError as error:
            self._stop(error)
            return None

    def _append(self, line: RecordLine | DropLine) -> bool:
        try:
            self._own.append(line.encoded())
        except OSError as error:
            self._stop(error)
            return False
        return True

    def _stop(self, error: OSError) -> None:
        with self._lock:
            if not self._stopped:
                self._stopped = True
                log.warning(
                    "decoded cache %s: %s; nothing more is kept, the %d samples that are there"
                    " still serve",
                    self.folder,
                    error,
                    self.entries,
                )
