"""The index of a decoded cache on disk. Its one writer appends a line for every event.

    crc TAB header TAB version TAB fingerprint                                            first line
    crc TAB record TAB sample TAB offset TAB bytes TAB crc of bytes TAB layout TAB values
    crc TAB drop   TAB writer TAB offset                    that record of this writer is bad

Each line begins with the crc32 of its rest. A damaged line loses only its own record, and an
incomplete last line is ignored.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loaders.cache.cache_records import Packed, values_to_text
from loaders.errors import CacheError

VERSION = 1


@dataclass(frozen=True, slots=True)
class RecordLine:
    """The record of a sample begins at `offset` of the writer's data."""

    sample_id: int
    offset: int
    nbytes: int
    crc: int
    layout: str
    values: str

    def encoded(self) -> bytes:
        head = f"record\t{self.sample_id}\t{self.offset}\t{self.nbytes}\t{self.crc:08x}"
        return encoded_line(f"{head}\t{self.layout}\t{self.values}")


@dataclass(frozen=True, slots=True)
class DropLine:
    """The record at `offset` of `writer`'s data is bad."""

    writer: int
    offset: int

    def encoded(self) -> bytes:
        return encoded_line(f"drop\t{self.writer}\t{self.offset}")


def record_line(sample_id: int, offset: int, crc: int, packed: Packed) -> RecordLine:
    layout, values = packed.layout, values_to_text(packed.values)
    return RecordLine(sample_id, offset, layout.nbytes, crc, layout.text, values)


def header_line(fingerprint: str) -> bytes:
    return encoded_line(f"header\t{VERSION}\t{fingerprint}")


def encoded_line(body: str) -> bytes:
    data = body.encode("ascii")
    return b"%08x\t%s\n" % (zlib.crc32(data), data)


@dataclass(slots=True)
class IndexReader:
    """Reads an index that may be growing. Every complete line is read once."""

    path: Path
    fingerprint: str
    position: int = 0
    """It has been read up to this byte."""
    damaged: int = 0
    """The number of lines whose checksum is wrong."""
    _end: int = 0

    def find_end(self) -> bool:
        """Look up the size of the index; returns whether there is more to read. Map the data after
        this call: then they include the records of these lines."""
        self._end = self.path.stat().st_size
        return self._end > self.position

    def read_new_lines(self) -> Iterator[RecordLine | DropLine]:
        """The lines up to where `find_end` found the end. CacheError: this is another index."""
        with self.path.open("rb") as file:
            file.seek(self.position)
            for line in file:
                end = self.position + len(line)
                if end > self._end or not line.endswith(b"\n"):
                    return
                if self.position == 0:
                    _check_header(self.path, line[:-1], self.fingerprint)
                elif parsed := _parsed(line[:-1]):
                    yield parsed
                else:
                    self.damaged += 1
                self.position = end


def _fields(line: bytes) -> list[str] | None:
    crc, _, body = line.partition(b"\t")
    if crc != b"%08x" % zlib.crc32(body):
        return None
    return body.decode("ascii").split("\t")


def _check_header(path: Path, line: bytes, fingerprint: str) -> None:
    fields = _fields(line)
    if fields is None or fields[0] != "header":
        raise CacheError(f"{path} is damaged at its beginning: delete the folder {path.parent}")
    if fields[1] != str(VERSION):
        raise CacheError(
            f"{path} was written in format {fields[1]}, this version reads {VERSION}: delete the"
            f" folder {path.parent} or give another cache folder"
        )
    if fields[2:] != [fingerprint]:
        raise CacheError(
            f"{path} is a cache of {fields[2:]}, not of {fingerprint}: somebody moved it there;"
            f" delete the folder {path.parent}"
        )


def _parsed(line: bytes) -> RecordLine | DropLine | None:
    match _fields(line):
        case ["record", sample_id, offset, nbytes, crc, layout, values]:
            place = int(sample_id), int(offset), int(nbytes), int(crc, 16)
            return RecordLine(*place, layout, values)
        case ["drop", writer, offset]:
            return DropLine(int(writer), int(offset))
    return None
