"""A file that is read from front to back, on this machine or behind a URL, in spite of faults.

    read --fault--> close, wait, open again, go on at the same byte      `retries` times in a row
                    0.5 s, 1 s, 2 s, ...

A local file has no faults that pass by, so it is not tried again. A file that has another length
than when it was opened first is refused: it is another file.
"""

import importlib
import logging
import os
import posixpath
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from loaders.errors import BackendMissing, DecodeError, SourceError
from loaders.sources.archives import AGAIN, COMPRESSED

log = logging.getLogger(__name__)

FIRST_WAIT = 0.5
MOST_WAIT = 30.0
SKIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardAccess:
    """How files are opened."""

    timeout: float
    """Seconds that a http(s) server may take to send something."""
    retries: int
    """How often a remote file is tried again while no byte of it comes."""
    options: dict[str, Any]
    """What fsspec gets for the file system."""
    wait: Callable[[float], None] = time.sleep

    def open(self, path: str) -> Any:
        """A binary file. It has a `size`, if that is known."""
        if not is_remote(path):
            return Path(path).open("rb")
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError as error:
            raise BackendMissing(
                f"fsspec opens {path}, and it is not installed: pip install fsspec[http], or"
                " '.[remote]'"
            ) from error
        options = dict(self.options)
        if path.startswith(("http://", "https://")) and "client_kwargs" not in options:
            aiohttp = importlib.import_module("aiohttp")
            limit = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout,
                                          sock_read=self.timeout)  # fmt: skip
            options["client_kwargs"] = {"timeout": limit}
        system, inside = fsspec.core.url_to_fs(path, **options)
        return system.open(inside, "rb", cache_type="readahead")


def is_remote(path: str) -> bool:
    return "://" in path


class ShardFile:
    """A file as tarfile reads it: `read`, `tell`, and `seek` forward."""

    def __init__(self, path: str, access: ShardAccess, offset: int, size: int | None) -> None:
        """It is read from byte `offset` on. `size` is its length, if that is known from before."""
        self.path = path
        self.size = size
        self.last = b""
        """What the latest read returned."""
        self._access = access
        self._retries = access.retries if is_remote(path) else 0
        self._at = offset
        self._file: Any = None

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> None:
        if offset < self._at:
            raise ValueError(f"byte {offset} is to come next, and a shard is read in its order")
        if offset == self._at:
            return
        if self._file is None or _can_go_to(self._file, offset):
            self._at = offset
        while self._at < offset and self.read(min(SKIP_BYTES, offset - self._at)):
            pass  # it is read to get past it

    def read(self, count: int) -> bytes:
        """So many bytes, or those up to the end of the file."""
        parts: list[bytes] = []
        left, failed = count, 0
        while left:
            try:
                file = self._file or self._opened()
                part = file.read(left)
                if not part and self.size is not None and self._at < self.size:
                    raise EOFError(f"the file ends at byte {self._at} of {self.size}")
            except (FileNotFoundError, PermissionError, BackendMissing, SourceError) as error:
                self.close()
                if isinstance(error, OSError):
                    raise SourceError(f"cannot open {self.path}: {error}") from error
                raise
            except Exception as error:  # every file system has errors of its own
                self.close()
                failed += 1
                if failed > self._retries:
                    raise self._given_up(error, failed) from error
                self._wait(error, failed)
                continue
            if not part:
                break
            failed = 0
            parts.append(part)
            self._at += len(part)
            left -= len(part)
        self.last = b"".join(parts)
        return self.last

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _opened(self) -> Any:
        file = self._access.open(self.path)
        try:
            size = getattr(file, "size", None)
            if isinstance(file, BufferedReader):
                size = os.fstat(file.fileno()).st_size
            if None not in (size, self.size) and size != self.size:
                raise SourceError(
                    f"{self.path} has {size} bytes now, and had {self.size} when it was read"
                    " before: change no file while it is read; begin with a new loader"
                )
            self.size = size if self.size is None else self.size
            left = 0 if _can_go_to(file, self._at) else self._at
            while left and (part := file.read(min(SKIP_BYTES, left))):
                left -= len(part)
        except BaseException:
            file.close()
            raise
        self._file = file
        return file

    def _wait(self, error: Exception, failed: int) -> None:
        seconds = min(FIRST_WAIT * 2 ** (failed - 1), MOST_WAIT)
        log.warning(
            "reading %s at byte %d failed (%s); it is tried again in %.1f s (%d of %d)",
            self.path, self._at, _describe(error), seconds, failed, self._retries,
        )  # fmt: skip
        self._access.wait(seconds)

    def _given_up(self, error: Exception, failed: int) -> DecodeError:
        tried = f" in {failed} tries" if failed > 1 else ""
        return DecodeError(
            f"cannot read {self.path} from byte {self._at} on{tried}: {_describe(error)}; look"
            " whether the file is whole and its server answers"
        )


def _can_go_to(file: Any, offset: int) -> bool:
    """Go to this byte of a file. False: its server does not send parts of files."""
    try:
        file.seek(offset)
    except (OSError, ValueError):
        return False
    return True


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


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
        raise _damage_error(file, begin, str(error)) from error
    if file.last != bytes(tarfile.BLOCKSIZE):
        raise _damage_error(file, begin, "there is no end of archive")


def _contents(file: ShardFile, info: tarfile.TarInfo) -> bytes:
    file.seek(info.offset_data)
    data = file.read(info.size) if info.size else b""
    if len(data) != info.size:
        raise DecodeError(
            f"cannot read {info.name} of {file.path} at byte {info.offset_data}: {len(data)} of"
            f" {info.size} bytes are there, so the tar was cut off: {AGAIN}"
        )
    return data


def _damage_error(file: ShardFile, begin: int, why: str) -> SourceError:
    for magic, kind, command in COMPRESSED:
        if not begin and file.last.startswith(magic):
            return SourceError(
                f"{file.path} is compressed ({kind}), so no place in it can be found again:"
                f" uncompress it once ({command})"
            )
    what = "damaged" if len(file.last) == tarfile.BLOCKSIZE else "cut off"
    return SourceError(f"{file.path} is {what} at byte {file.tell()} ({why}): {AGAIN}")
