"""Samples that a decoded cache is given, and how what it holds is checked."""

from pathlib import Path

import numpy as np
import torch

from loaders.cache.cache import DecodedCache
from loaders.cache.disk_cache import DiskCache

MIB = 2**20
NAME = "data-of-today"
SAMPLES = 8


def picture(sample_id: int, size: int = 40) -> torch.Tensor:
    pixels = np.random.default_rng(sample_id).integers(0, 256, (size, size, 3), np.uint8)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def holds(cache: DecodedCache, sample_id: int, size: int = 40) -> bool:
    """True: found and right; False: not found; wrong pixels are no answer."""
    found = cache.read(sample_id)
    if found is None:
        return False
    assert torch.equal(found[0], picture(sample_id, size))
    assert found[1:] == [sample_id, "label"]
    return True


def offer(cache: DecodedCache, sample_id: int, size: int = 40) -> bool:
    return cache.offer(sample_id, [picture(sample_id, size), sample_id, "label"])


def fill(folder: Path, writer: int = 0, ids: range = range(SAMPLES)) -> None:
    with DiskCache(folder, 64 * MIB, NAME, writer) as cache:
        assert all(offer(cache, i) for i in ids)
