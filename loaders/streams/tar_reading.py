"""The samples of a tar, one after the other: neighbours whose names are equal up to the first dot.

    a/1.jpg | a/1.cls | a/2.jpg | a/2.cls | zeros          two samples: a/1 and a/2
    ^ byte 0            ^ byte 9216: reading may begin here, too

This is WebDataset's convention. A tar ends in a block of zeros; one that does not was cut off.
"""

import posixpath
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from loaders.errors import DecodeError, SourceError
from loaders.sources.archives import AGAIN, COMPRESSED
from loaders.streams.shard_files import ShardFile

KEY = "__key__"
"""The entry of a sample that has its name."""


@dataclass(slots=True)
class TarSample:
    """The files of one sample."""

    key: str
    offset: int
    """Where its first header begins."""
    files: dict[str, bytes]
    """What follows the first dot of each name, in small letters, and the contents."""


def tar_samples(file: ShardFile, wanted: Callable[[], bool]) -> Iterator[TarSample]:
    """The samples from where `file` stands; those that are not `wanted` come without contents."""
    sample: TarSample | None = None
    read = True
    for info in _members(file):
        folder, base = posixpath.split(posixpath.normpath(info.name))
        stem, _, suffix = base.partition(".")
        if not stem:
            continue  # .DS_Store, ._1.jpg
        key, suffix = posixpath.join(folder, stem), suffix.lower()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            read, sample = wanted(), TarSample(key, info.offset, {})
        if suffix in sample.files:
            raise SourceError(
                f"{file.path}: {info.name} comes twice (at byte {info.offset}): pack every file"
                " once"
            )
        sample.files[suffix] = _contents(file, info) if read else b""
    if sample is not None:
        yield sample


def _members(file: ShardFile) -> Iterator[tarfile.TarInfo]:
    begin = file.tell()
    try:
        tar = tarfile.open(fileobj=cast(Any, file), mode="r:")  # noqa: SIM115
        info = tar.next()  # again the one that opening has read
        while info is not None:
            cast(Any, tar).members = []  # else it would keep everything that it has read
            if info.issym() or info.islnk():
                raise SourceError(
                    f"{file.path}: {info.name} is a link to {info.linkname}, which a stream cannot"
                    " follow: pack with tar --dereference --hard-dereference"
                )
            if info.issparse():
                raise SourceError(f"{file.path}: {info.name} has holes: pack without --sparse")
            if info.isreg():
                yield info
            info = tar.next()
    except (tarfile.TarError, ValueError) as error:  # the latter of sizes that are none
        raise _damaged(file, begin, str(error)) from error
    if file.last != bytes(tarfile.BLOCKSIZE):
        raise _damaged(file, begin, "there is no end of archive")


def _contents(file: ShardFile, info: tarfile.TarInfo) -> bytes:
    file.seek(info.offset_data)
    data = file.read(info.size) if info.size else b""
    if len(data) != info.size:
        raise DecodeError(
            f"cannot read {info.name} of {file.path} at byte {info.offset_data}: {len(data)} of"
            f" {info.size} bytes are there, so the tar was cut off: {AGAIN}"
        )
    return data


def _damaged(file: ShardFile, begin: int, why: str) -> SourceError:
    for magic, kind, command in COMPRESSED:
        if not begin and file.last.startswith(magic):
            return SourceError(
                f"{file.path} is compressed ({kind}), so no place in it can be found again:"
                f" uncompress it once ({command})"
            )
    what = "damaged" if len(file.last) == tarfile.BLOCKSIZE else "cut off"
    return SourceError(f"{file.path} is {what} at byte {file.tell()} ({why}): {AGAIN}")
