"""The cache that a user asks for, and how it is opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from loaders.cache.cache import CacheKind, DecodedCache, RamCache
from loaders.cache.disk_cache import DiskCache
from loaders.cache.fingerprint import fingerprint, verify
from loaders.errors import check_at_least_one, check_word


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
