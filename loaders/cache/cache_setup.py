"""Which cache a user asked for, and the cache that is opened for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from loaders.cache.cache import CacheKind, DecodedCache, RamCache
from loaders.cache.disk_cache import DiskCache
from loaders.cache.fingerprint import fingerprint, verify


def open_cache(
    kind: Literal["ram", "disk"],
    limit_bytes: int,
    folder: Path | None,
    fingerprint: str,
    writer: int,
) -> DecodedCache:
    """`folder` is where caches on disk lie; each fingerprint has a sub-folder. `limit_bytes` holds
    for this process in RAM, and on disk for all writers of a fingerprint together. `writer` is the
    rank."""
    if limit_bytes < 1:
        raise ValueError(f"limit_bytes must be at least 1, not {limit_bytes}")
    if kind == "ram":
        return RamCache(limit_bytes)
    if kind != "disk":
        raise ValueError(f"kind must be 'ram' or 'disk', not {kind!r}")
    if folder is None:
        raise ValueError("a cache on disk needs a folder to lie in: give folder")
    return DiskCache(folder, limit_bytes, fingerprint, writer)


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """The cache that a user asked for."""

    kind: CacheKind
    limit_bytes: int | None
    folder: Path | None
    key: str | None = None
    """Vouches for what of a data set cannot be told."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(CacheKind):
            raise ValueError(
                f"cache must be one of {', '.join(get_args(CacheKind))}, not {self.kind!r}"
            )
        if self.limit_bytes is None:
            raise ValueError(
                f'cache="{self.kind}" needs cache_bytes: give the bytes that it may take'
            )
        if (self.folder is None) == (self.kind == "disk"):
            raise ValueError(
                'cache="disk" needs cache_dir: give the folder to keep it in'
                if self.kind == "disk"
                else f"cache_dir={self.folder} has no effect: a cache in RAM has no folder"
            )

    def open(self, dataset: Any, writer: int) -> DecodedCache:
        if self.kind == "ram" or self.folder is None:
            return open_cache(self.kind, self.limit_bytes or 0, self.folder, "", writer)
        identity = fingerprint(dataset, self.key, self.folder)
        cache = open_cache(self.kind, self.limit_bytes or 0, self.folder, identity, writer)
        try:
            verify(cache, dataset, self.folder / identity)
        except BaseException:
            cache.close()
            raise
        return cache
