"""The decoded cache on disk: later runs find its files again, and so do the other ranks."""

import logging
import re
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final, get_args

from loaders.cache.cache import CacheKind, DecodedCache, RamCache
from loaders.cache.cache_files import (
    Catalogue,
    MappedSegment,
    RecordPlace,
    WriterAlive,
    WriterFiles,
    bytes_of_others,
    data_path,
)
from loaders.cache.cache_records import DropLine, RecordLine, aligned, record_line, unpack
from loaders.cache.fingerprint import fingerprint, verify
from loaders.errors import CacheError, check_at_least_one, check_word

log = logging.getLogger(__name__)


@final
class DiskCache(DecodedCache):
    """Keeps samples in files (`cache_files`). Later runs find them, and other ranks by `refresh`.

    A record of another process is verified when it is first read; a bad one is dropped for good,
    and its sample is decoded and offered again. While another live process is `writer`, this one
    only reads. A forked child must not use a cache. The process ends with SIGBUS if somebody
    truncates a mapped file, or if a sector is unreadable.
    """

    def __init__(self, folder: Path, limit_bytes: int, fingerprint: str, writer: int) -> None:
        super().__init__(limit_bytes)
        self.folder = folder / fingerprint
        # `close` waits on it until no record is being written.
        self._lock = threading.Condition()
        self._fingerprint, self._writer = fingerprint, writer
        self._catalogue = Catalogue(self.folder, fingerprint, None, self._layouts)
        self._kept = self._catalogue.places
        self._end = 0
        self._files: WriterFiles | None = None
        """The files that this process writes. None: it only reads."""
        self._stopped = False
        self._closed = False
        if not re.fullmatch(r"\w[\w.-]*", fingerprint):
            raise ValueError(f"fingerprint must be usable as a folder's name, not {fingerprint!r}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise CacheError(
                f"no decoded cache in {self.folder} can be opened: {error}; give a folder that this"
                ' user may write to, on a disk with room, or use cache="ram"'
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
        if sample_id in self._kept or self._stopped or self._closed or self._files is None:
            return False
        packed = self._pack(sample_id, leaves)
        if packed is None:
            return False
        with self._lock:
            taken = sample_id in self._kept or sample_id in self._in_progress
            files = self._files
            if taken or self._stopped or self._closed or files is None:
                return False
            line = record_line(sample_id, files.sizes.tail, 0, packed)
            reserved = self._reserve(packed.layout.nbytes, len(line.encoded()))
            if reserved is None:
                return False
            self._in_progress.add(sample_id)
        segment, offset = reserved
        place = None
        try:
            crc = packed.crc()
            files.write(offset, packed.rows_by_start())
            line = record_line(sample_id, offset, crc, packed)
            at = offset - segment.start
            place = RecordPlace(segment, at, crc, packed.layout, packed.values, checked=True)
        except OSError as error:
            self._stop(error)
        finally:
            with self._lock:
                self._in_progress.discard(sample_id)
                if place is not None and self._append(line):
                    self._end = max(self._end, offset + aligned(packed.layout.nbytes))
                    self._kept[sample_id] = place
                self._lock.notify_all()
        return sample_id in self._kept

    def refresh(self) -> None:
        with self._lock:
            if self._closed:
                return
            if self._files is not None:
                self._files.retry_growth()
            else:
                self._take_over()
            self._catalogue.admit_others()

    @property
    def nbytes(self) -> int:
        """The bytes of all writers; others were looked up when this one last reserved space."""
        mine = self._files
        return bytes_of_others(self.folder, None) if mine is None else mine.others + mine.sizes.used

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._in_progress)
            self._kept.clear()
            if self._files is not None:
                self._files.close(self._end)

    def _open(self) -> None:
        try:
            if not self._start_writing():
                log.warning(
                    "decoded cache %s: another live process writes it as number %d; this"
                    " one reads what that one adds, and writes when it has ended",
                    self.folder,
                    self._writer,
                )
            self._catalogue.admit_others()
        except BaseException:
            if self._files is not None:
                self._files.close(None)
            raise
        log.info(
            "decoded cache %s: samples: %d, bytes: %d of %d",
            self.folder,
            self.entries,
            self.nbytes,
            self.limit_bytes,
        )
        if self.nbytes > self.limit_bytes:
            log.warning(
                "decoded cache %s takes %d bytes already, the limit is %d: nothing is added to it"
                " and nothing deleted; delete the folder to make it smaller, or raise limit_bytes",
                self.folder,
                self.nbytes,
                self.limit_bytes,
            )
        self._log_other_caches()

    def _start_writing(self) -> bool:
        """Open the files of this writer; returns False if another process writes them."""
        try:
            files = WriterFiles(self.folder, self._writer, self._fingerprint, self.limit_bytes)
        except WriterAlive:
            return False
        try:
            files.index.find_end()
            self._catalogue.own_writer = self._writer
            self._catalogue.readers.pop(self._writer, None)  # its records are read again
            self._end = self._catalogue.admit(files.index, files.map_all())
            cut_off = files.truncate_after(self._end)
        except BaseException:
            files.close(None)
            raise
        if cut_off:
            log.info(
                "%s: cut off %d bytes behind the last whole record: the last run did not close the"
                " cache",
                data_path(self.folder, self._writer),
                cut_off,
            )
        self._files = files
        return True

    def _take_over(self) -> None:
        """Start writing, if the other process has ended."""
        try:
            if not self._stopped and self._start_writing():
                log.info("decoded cache %s: the other writer has ended", self.folder)
        except (OSError, CacheError) as error:
            self._stop(error)

    def _log_other_caches(self) -> None:
        indexes = self.folder.parent.glob("*/writer-*.index")
        others = sorted({path.parent.name for path in indexes} - {self.folder.name})
        if others:
            log.info(
                "%s also holds decoded caches of other data or other settings: %s; delete those"
                " that no run needs",
                self.folder.parent,
                ", ".join(others),
            )

    def _verify(self, sample_id: int, place: RecordPlace) -> bool:
        end = place.at + place.layout.nbytes
        if zlib.crc32(place.segment.memory.numpy()[place.at : end].data) == place.crc:
            place.checked = True
            return True
        with self._lock:
            if self._closed or self._kept.get(sample_id) is not place:
                return False  # another thread has dropped it already
            del self._kept[sample_id]
            writer, offset = place.key
            self._catalogue.dropped.add(place.key)
            log.warning(
                "%s: sample %d at byte %d does not have the checksum that it was written with: it"
                " is dropped from the cache and decoded again",
                data_path(self.folder, writer),
                sample_id,
                offset,
            )
            line = DropLine(writer, offset)
            if not self._stopped and self._reserve(0, len(line.encoded())):
                self._append(line)
        return False

    def _reserve(self, nbytes: int, line: int) -> tuple[MappedSegment, int] | None:
        if self._files is None:
            return None
        try:
            return self._files.reserve(nbytes, line)
        except OSError as error:
            self._stop(error)
            return None

    def _append(self, line: RecordLine | DropLine) -> bool:
        assert self._files is not None  # space was reserved there
        try:
            self._files.append(line.encoded())
        except OSError as error:
            self._stop(error)
            return False
        return True

    def _stop(self, error: Exception) -> None:
        with self._lock:
            if not self._stopped:
                self._stopped = True
                log.warning(
                    "decoded cache %s: %s; nothing more is kept in this run, but what is there"
                    " is still served (samples: %d)",
                    self.folder,
                    error,
                    self.entries,
                )


@dataclass(frozen=True, slots=True)
class Cache:
    """Where decoded samples are kept from pass to pass: `Cache("ram", limit_bytes=8 << 30)`."""

    kind: CacheKind
    limit_bytes: int
    """The most bytes it may use: in RAM for this process, on disk for all processes together."""
    folder: Path | str | None = None
    """Where caches on disk are; each data set has a sub-folder."""
    key: str | None = None
    """Names the version of those parts of a data set that a cache on disk cannot hash."""

    def __post_init__(self) -> None:
        check_word("kind", self.kind, get_args(CacheKind))
        check_at_least_one("limit_bytes", self.limit_bytes)
        if self.kind == "disk" and self.folder is None:
            raise ValueError('Cache("disk") needs a folder to keep it in: give folder')
        if self.key is not None and not isinstance(self.key, str):
            raise TypeError(f"key must be a word (str), not {type(self.key).__name__}")
        for name in ("folder", "key"):
            if self.kind == "ram" and (given := getattr(self, name)) is not None:
                raise ValueError(f"{name}={given!r} has no effect on a cache in RAM: leave it out")

    def open(self, dataset: Any, writer: int) -> DecodedCache:
        """`writer` is the rank."""
        if self.folder is None:
            return RamCache(self.limit_bytes)
        folder = Path(self.folder)
        identity = fingerprint(dataset, self.key, folder)
        cache = DiskCache(folder, self.limit_bytes, identity, writer)
        try:
            verify(cache, dataset, folder / identity)
        except BaseException:
            cache.close()
            raise
        return cache
