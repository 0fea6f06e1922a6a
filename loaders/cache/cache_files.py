"""The files of a decoded cache on disk: `CACHE_DIR/FINGERPRINT/writer-N.{data,index}`.

    data  | record 0 |..| record 1 |..| record 2 |..| space that a live writer has reserved ... |
           0             64-byte aligned             '- released when it closes, or reopens ----'
          |--------- mapped at opening --------||-- mapped when it was reserved --|

Each pair of files has one writer, and only grows. A line of the index (`cache_records`) is written
after its bytes, which are never written again: a kill leaves whole records and a tail that no line
refers to. (A power cut may lose the bytes of a line, so records have checksums.) Space is reserved
in large extents, under one lock of the folder, so that the limit holds for all ranks together. The
size of the data file is all that its writer has reserved, with its index: it ends in a hole.
"""

import errno
import logging
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.cache.cache_records import (
    DropLine,
    IndexReader,
    RecordLayout,
    RecordLayouts,
    aligned,
    header_line,
    values_from_text,
)
from loaders.errors import CacheError

log = logging.getLogger(__name__)

EXTENT = 64 * 2**20
BUDGET_LOCK = "budget.lock"


class WriterAlive(CacheError):
    """Another live process has the files of this writer."""


@dataclass(frozen=True, slots=True, eq=False)
class MappedSegment:
    """Bytes `start` to `start + len(memory)` of a writer's data, mapped for reading."""

    writer: int
    start: int
    memory: torch.Tensor
    pages: mmap.mmap | None = None

    def fetch(self, at: int, nbytes: int) -> None:
        """Read a whole record ahead. Page faults would read single pages, or, with the system's
        read-ahead, megabytes around them (12 times as much was measured)."""
        if self.pages is not None and nbytes:
            start = at - at % mmap.PAGESIZE
            self.pages.madvise(mmap.MADV_WILLNEED, start, at + nbytes - start)


class _ReadOnlyPages:
    """Read-only pages that numpy takes for writable, because torch warns of read-only arrays. A
    write is a segmentation fault, and never a wrong picture."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._keep = np.frombuffer(pages, np.uint8)
        interface = dict(self._keep.__array_interface__)
        address = interface["data"][0]
        self.__array_interface__: dict[str, Any] = {**interface, "data": (address, False)}


def _empty_segment(writer: int) -> MappedSegment:
    return MappedSegment(writer, 0, torch.empty(0, dtype=torch.uint8))


def map_segment(fd: int, writer: int, start: int, end: int) -> MappedSegment:
    """Map the bytes [start, end) of a data file. `start` is rounded down to a page's first byte."""
    start -= start % mmap.ALLOCATIONGRANULARITY
    if end <= start:
        return _empty_segment(writer)
    pages = mmap.mmap(fd, end - start, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
    pages.madvise(mmap.MADV_RANDOM)
    return MappedSegment(writer, start, torch.from_numpy(np.asarray(_ReadOnlyPages(pages))), pages)


@dataclass(slots=True)
class FileSizes:
    """How far a writer's files are filled."""

    data_bytes: int
    """The size of the data file: all the space that is reserved, for the index too."""
    tail: int = 0
    """Where the next record begins."""
    index_bytes: int = 0
    pending: int = 0
    """The bytes of index lines that will be appended."""

    @property
    def used(self) -> int:
        return self.tail + self.index_bytes + self.pending


class WriterFiles:
    """This process's data and index file. Several threads may `write`; one calls anything else."""

    def __init__(self, folder: Path, writer: int, fingerprint: str, limit_bytes: int) -> None:
        """Open and lock the files. WriterAlive: another process is `writer`. Read `index` and call
        `truncate_after` before anything else."""
        self.folder = folder
        self.writer = writer
        self.limit_bytes = limit_bytes
        self._refused: int | None = None
        """So many bytes did not fit within the limit."""
        self._header = header_line(fingerprint)
        self._segment = _empty_segment(writer)
        self._data = self._index = -1
        try:
            # The process that locks the index owns both files. The system unlocks the index when
            # the process ends.
            path = index_path(folder, writer)
            self._index = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            _lock(self._index, path)
            self._data = os.open(data_path(folder, writer), os.O_RDWR | os.O_CREAT, 0o644)
            self.index = IndexReader(path, fingerprint)
            self.sizes = FileSizes(os.fstat(self._data).st_size)
            self.others = bytes_of_others(folder, writer)
        except BaseException:
            self._close_files()
            raise

    def truncate_after(self, end: int) -> int:
        """Cut off everything after `end`, where the last record ends; returns how many bytes."""
        sizes = self.sizes
        sizes.tail, sizes.index_bytes = end, self.index.position
        os.ftruncate(self._index, sizes.index_bytes)  # its last line may be incomplete
        excess = max(sizes.data_bytes - sizes.used, 0)
        if excess:
            self._release()
        self._begin_index()
        return excess

    def map_all(self) -> MappedSegment:
        return map_segment(self._data, self.writer, 0, self.sizes.data_bytes)

    def reserve(self, nbytes: int, line: int) -> tuple[MappedSegment, int] | None:
        """Reserve space for a record and its line of the index; returns the segment that maps it
        and its offset in the file. None: the limit does not allow it."""
        if not self._begin_index() or not self._has_space(aligned(nbytes) + line):
            return None
        offset = self.sizes.tail
        self.sizes.tail += aligned(nbytes)
        self.sizes.pending += line
        return self._segment, offset

    def write(self, offset: int, rows_by_start: Sequence[tuple[int, NDArray[np.uint8]]]) -> None:
        for start, row in rows_by_start:
            left = row.data
            while left:
                written = os.pwrite(self._data, left, offset + start + len(row) - len(left))
                left = left[written:]

    def append(self, line: bytes) -> None:
        """Add a line to the index, all of it or nothing. Space was reserved for it before."""
        self.sizes.pending -= len(line)
        try:
            if os.write(self._index, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._index, self.sizes.index_bytes)
            raise
        self.sizes.index_bytes += len(line)

    def retry_growth(self) -> None:
        """Try to reserve space again, because another process may have released some."""
        self._refused = None

    def close(self, end: int | None) -> None:
        """Release the space after `end` (None: keep it), and unlock the files."""
        try:
            if end is not None and self._data >= 0:
                self.sizes.tail, self.sizes.pending = end, 0
                self._release()
        finally:
            self._close_files()

    def _release(self) -> None:
        os.ftruncate(self._data, self.sizes.tail)  # so that the space after it reads as zeros
        os.ftruncate(self._data, self.sizes.used)
        self.sizes.data_bytes = self.sizes.used

    def _begin_index(self) -> bool:
        if not self.sizes.index_bytes and self._has_space(len(self._header)):
            self.sizes.pending += len(self._header)
            self.append(self._header)
        return self.sizes.index_bytes > 0

    def _has_space(self, nbytes: int) -> bool:
        if self.sizes.used + nbytes <= self.sizes.data_bytes:
            return True
        if self._refused is not None and nbytes >= self._refused:
            return False
        if self._grow(nbytes):
            return True
        self._refused = nbytes
        return False

    def _grow(self, nbytes: int) -> bool:
        """Reserve an extent of the space that is left to all writers together."""
        sizes = self.sizes
        with _hold_lock(self.folder / BUDGET_LOCK):
            others = bytes_of_others(self.folder, self.writer)
            # Extents grow with the file, because every mapped extent takes a file descriptor.
            extent = max(nbytes, min(EXTENT, self.limit_bytes // 64), sizes.data_bytes // 8)
            end = min(sizes.used + extent, self.limit_bytes - others)
            if end < sizes.used + nbytes:
                return False
            os.ftruncate(self._data, end)
            self.others = others
        sizes.data_bytes = end
        self._segment = map_segment(self._data, self.writer, sizes.tail, end)
        return True

    def _close_files(self) -> None:
        for fd in (self._data, self._index):
            if fd >= 0:
                os.close(fd)
        self._data = self._index = -1
        self._segment = _empty_segment(self.writer)  # a mapping holds the file open


@dataclass(slots=True, eq=False)
class RecordPlace:
    """Where a record is, and its layout."""

    segment: MappedSegment
    at: int
    crc: int
    layout: RecordLayout
    values: tuple[Any, ...]
    checked: bool
    """Whether its checksum was verified."""

    @property
    def key(self) -> tuple[int, int]:
        return self.segment.writer, self.segment.start + self.at


@dataclass(slots=True)
class Catalogue:
    """The records that all writers of a folder have written, by sample."""

    folder: Path
    fingerprint: str
    own_writer: int | None
    """None: this process writes nothing."""
    layouts: RecordLayouts
    places: dict[int, RecordPlace] = field(default_factory=dict)
    dropped: set[tuple[int, int]] = field(default_factory=set)
    readers: dict[int, IndexReader] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    def admit_others(self) -> None:
        """Read the lines that other writers added to their indexes since the last call."""
        for writer in _other_writers(self.folder, {self.own_writer, *self.refused}):
            reader = IndexReader(index_path(self.folder, writer), self.fingerprint)
            reader = self.readers.setdefault(writer, reader)
            try:
                if reader.find_end():
                    self.admit(reader, _map_others(self.folder, writer))
            except CacheError as error:  # its header is wrong
                log.warning(
                    "decoded cache: the samples of writer %d are not used: %s", writer, error
                )
                self.refused.add(writer)

    def admit(self, reader: IndexReader, segment: MappedSegment) -> int:
        """Read the new lines of an index; returns where the last record ends. `segment` maps the
        index's data from their first byte."""
        end = lost = 0
        damaged_before, drops = reader.damaged, set[tuple[int, int]]()
        for line in reader.read_new_lines():
            if isinstance(line, DropLine):
                drops.add((line.writer, line.offset))
                continue
            end = max(end, aligned(line.offset + line.nbytes))
            layout = self.layouts.parse(line.layout)
            if layout is None or line.offset + layout.nbytes > len(segment.memory):
                lost += 1
                continue
            before = self.places.get(line.sample_id)
            if (segment.writer, line.offset) in self.dropped or (
                before and before.segment.writer != segment.writer
            ):
                continue
            # (A writer keeps a sample a second time only if its first record was bad.)
            values = values_from_text(line.values)
            place = RecordPlace(segment, line.offset, line.crc, layout, values, checked=False)
            self.places[line.sample_id] = place
        self.dropped |= drops
        if drops:
            for sample_id in [s for s, place in self.places.items() if place.key in drops]:
                del self.places[sample_id]
        if lost or reader.damaged > damaged_before:
            log.warning(
                "%s has %d damaged lines, and %d records whose data are missing or of an unknown"
                " type: their samples are decoded again",
                reader.path,
                reader.damaged - damaged_before,
                lost,
            )
        return end


# ---- names and locks -----------------------------------------------------------------------------


def data_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer}.data"


def index_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer}.index"


def _other_writers(folder: Path, known: set[int | None]) -> list[int]:
    """The writers whose indexes are in `folder`, without the `known` ones."""
    names = [re.fullmatch(r"writer-(\d+)\.index", path.name) for path in folder.iterdir()]
    return sorted({int(name[1]) for name in names if name} - known)


def _map_others(folder: Path, writer: int) -> MappedSegment:
    """Map the data of another process; the segment is empty if they do not exist any longer."""
    try:
        fd = os.open(data_path(folder, writer), os.O_RDONLY)
    except FileNotFoundError:
        return _empty_segment(writer)
    try:
        return map_segment(fd, writer, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def bytes_of_others(folder: Path, writer: int | None) -> int:
    left_out = "" if writer is None else data_path(folder, writer).name
    data = [path for path in folder.glob("writer-*.data") if path.name != left_out]
    return sum(path.stat().st_size for path in data)


def _lock(fd: int, path: Path) -> None:
    import fcntl  # Windows does not have it, but can use the cache in RAM

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise WriterAlive(f"another live process writes {path}") from error


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
